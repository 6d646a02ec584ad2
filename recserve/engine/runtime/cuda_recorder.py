"""Launches recorded as CUDA graphs, which are replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

WARM_UP = 2

T = TypeVar("T")


class CudaRecorder:
    """Records a function of no arguments as a CUDA graph; all of them share one memory pool and one
    stream, beside which libraries keep workspaces.

    bytes: memory taken by all records so far.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]:
        """The replay; its outputs lie where the record left them. Where the record fails, the
        caller's stream is current again.
        """
        current = torch.cuda.current_stream()
        try:
            return self._recorded(step)
        except BaseException:
            # torch leaves its own current where it cannot end the capture.
            torch.cuda.set_stream(current)
            torch.cuda.synchronize()
            raise

    def _recorded(self, step: Callable[[], T]) -> Callable[[], T]:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):  # kernels are compiled and libraries take their workspaces
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            outputs = step()
        self.bytes += max(torch.cuda.memory_reserved() - before, 0)

        def replay() -> T:
            graph.replay()
            return outputs

        return replay
