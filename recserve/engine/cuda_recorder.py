"""Launches recorded as CUDA graphs, which are replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

WARM_UP = 2

T = TypeVar("T")


class CudaRecorder:
    """Records a function of no arguments as a CUDA graph; all of them share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._before = torch.cuda.memory_reserved()

    @property
    def bytes(self) -> int:
        """Memory taken since the first record."""
        return torch.cuda.memory_reserved() - self._before

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]:
        """The replay; its outputs lie where the record left them."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):  # kernels are compiled and libraries take their workspaces
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = step()

        def replay() -> T:
            graph.replay()
            return outputs

        return replay
