"""Prefills as CUDA graphs: a new history, or a new event behind a cached one.

The host needs hundreds of microseconds to launch a layer. For up to about a thousand rows the
device computes it in less, so the prefill of one request waits for the host. A graph holds the
layers for up to a number of rows. Its
inputs are embedded outside, because tables of items may move. They lie in buffers at fixed
addresses. Rows after the prefill's own form a second tree, without a root, that writes to the
spare slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.engine.runtime.cuda_graphs import (
    CapturedGraph,
    CaptureLimits,
    CudaRecorder,
    GraphCapture,
    is_cuda,
)
from recserve.engine.runtime.runner import BatchSlice, Runner
from recserve.kernels.attention.reference import SOFTMAX
from recserve.kernels.tree import TokenTree
from recserve.kernels.tree_batch import PrefixTable, TreeBatch
from recserve.models.attention import PagedAttention
from recserve.models.language_model import LanguageModel
from recserve.models.recommender import Recommender

Model = Recommender | LanguageModel
STATES = 16  # most last rows whose states are read: the last token, and placeholders
LIMITS = CaptureLimits(seconds=20.0, bytes=2**30)


@dataclass(frozen=True)
class PrefillBucket:
    """What one graph of a prefill is captured for.

    Attributes:
        rows: Rows of the graph. A prefill has fewer, so that the second tree is not empty.
    """

    rows: int

    @property
    def name(self) -> str:
        """For example `prefill 64`, the most rows of a prefill."""
        return f"prefill {self.rows - 1}"


# On an H200 a launched prefill of a model with 28 layers keeps the host busy for 11 to 17 ms, and
# the device for 5.8 ms at 1,001 rows (docs/results/gpu.md).
BUCKETS = tuple(PrefillBucket(rows + 1) for rows in (16, 64, 256, 512, 1024))


class GraphPrefill:
    """The layers over a chain of at most `rows - 1` embedded tokens under a cached root."""

    def __init__(self, runner: Runner, model: Model, rows: int) -> None:
        """Allocates the buffers.

        Args:
            runner: The runner of the model.
            model: Its decoder runs.
            rows: Rows of the graph.
        """
        pool, weight = runner.pool, model.tokens.weight
        self.runner, self.model, self.rows = runner, model, rows
        device, width = weight.device, model.config.decoder.max_positions
        self._x = weight.new_zeros(rows, weight.shape[1])
        self._slots = torch.full((rows,), pool.spare_slot, device=device)
        self._root = torch.full((1, width), pool.spare_slot, device=device)
        # Root lengths of both trees, and where the trees begin and end.
        self._lengths = torch.zeros(2, dtype=torch.int64, device=device)
        self._offsets = torch.zeros(3, dtype=torch.int64, device=device)
        self._offsets[1:].fill_(rows)
        self._offsets[1:2].fill_(1)
        self._index = torch.arange(rows, device=device)
        self._last = torch.arange(STATES, device=device) - STATES
        self._table_rows = torch.zeros(2, dtype=torch.int64, device=device)

    def load(self, piece: BatchSlice, x: Tensor) -> None:
        """Copies a prefill and its embedded tokens x [n, E] to the buffers, without a host wait."""
        count, root = x.shape[0], piece.prefix_slots[0]
        self._x[:count].copy_(x)
        self._slots[:count].copy_(piece.slots)
        self._slots[count:].fill_(self.runner.pool.spare_slot)
        self._root[0, : root.shape[0]].copy_(root)
        self._lengths[:1].fill_(root.shape[0])
        self._offsets[1:2].fill_(count)

    def __call__(self) -> Tensor:
        """Returns [STATES, E] the last states of the loaded prefill, the last one at the end."""
        count = self._offsets[1]
        own = self._index < count
        tree = TokenTree(
            tokens=self._index,  # not read
            parents=self._index - 1,  # not read
            depths=torch.where(own, self._index, self._index - count),
            ends=torch.where(own, count, self.rows),
            offsets=self._offsets,
        )
        roots = PrefixTable(self._root, self._table_rows, self._lengths)
        batch = TreeBatch(tree, None, self._slots, roots, fillers=1)
        attend = PagedAttention(batch, self.runner.pool, SOFTMAX, self.runner.attention)
        read = (self._last + count).clamp(min=0)
        states: Tensor = self.model.decoder(self._x, batch.positions(), attend, read)
        return states


class PrefillGraphs:
    """The captured prefills of one model.

    Attributes:
        captured: The graphs, from few rows to many.
        replays: Number of replayed prefills.
    """

    @torch.inference_mode()
    def __init__(
        self,
        runner: Runner,
        model: Model,
        record: Callable[[Callable[[], Tensor]], Callable[[], Tensor]],
        taken: Callable[[], int] = lambda: 0,
        buckets: tuple[PrefillBucket, ...] = BUCKETS,
    ) -> None:
        """Captures all prefills.

        Args:
            runner: The runner of the model.
            model: The model.
            record: Captures a function and returns its replay.
            taken: Returns the bytes that captures have taken so far.
            buckets: What is captured, from few rows to many.
        """
        self._model, self.replays = model, 0
        capture = GraphCapture[PrefillBucket, GraphPrefill, Tensor](
            lambda bucket: GraphPrefill(runner, model, bucket.rows), record, taken, LIMITS
        )
        self.captured: list[CapturedGraph[PrefillBucket, GraphPrefill, Tensor]]
        longest = model.config.decoder.max_positions
        # The largest history needs one graph that holds it, and none beyond.
        fitting = [b for n, b in enumerate(buckets) if not n or buckets[n - 1].rows <= longest]
        self.captured = capture(fitting) or []

    def __call__(self, piece: BatchSlice) -> Tensor | None:
        """Returns the states of a prefill [num_states, E], or None if no graph holds it."""
        count, states = len(piece.inputs), piece.num_states
        if states is None or not 0 < states <= min(STATES, count) or len(piece.prefix_slots) != 1:
            return None
        longest = self._model.config.decoder.max_positions
        if piece.tree.shared is not None or piece.prefix_slots[0].shape[0] > longest:
            return None
        for graph in self.captured:
            if count < graph.bucket.rows:
                graph.function.load(piece, self._embedded(piece.inputs.tokens))
                self.replays += 1
                return graph.replay()[STATES - states :].clone()
        return None

    def _embedded(self, tokens: Tensor) -> Tensor:
        model = self._model
        if isinstance(model, Recommender):
            return model.embed(tokens)
        found: Tensor = model.tokens(tokens)
        return found


def cuda_prefills(runner: Runner, model: Model, wanted: bool | None) -> PrefillGraphs | None:
    """Captures the prefills of a model on a CUDA device. Returns None on others, or if not wanted.

    Args:
        runner: The runner of the model.
        model: The model.
        wanted: False disables graphs.
    """
    if wanted is False or not is_cuda(runner.pool.keys.device):
        return None
    recorder = CudaRecorder()
    return PrefillGraphs(runner, model, recorder, lambda: recorder.bytes)
