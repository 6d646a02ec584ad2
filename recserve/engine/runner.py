"""The runner: one forward pass of one model over packed trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from recserve.kernels.attention.attention import BatchAttention, tree_attention
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.host import on_device
from recserve.kernels.native.threads import threads_for
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.adapters import ModelAdapter
from recserve.models.attention import PagedAttention
from recserve.models.decoder import AuxHiddenStates
from recserve.models.inputs import NodeInputs
from recserve.models.packing import row_weights


class DeviceLost(RuntimeError):
    """The device of a model fails every call since an earlier error; only a new process helps."""


class Runner:
    """A network and its key-value pool.

    Attributes:
        adapter: The network.
        pool: The key-value pool.
        attention: Computes the attention of a batch.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        pool: KVPool,
        attention: BatchAttention = tree_attention,
    ) -> None:
        self.adapter = adapter
        self.pool = pool
        self.attention = attention
        self._weights = 0 if pool.keys.is_cuda else row_weights(adapter.model)

    def check_device(self) -> None:
        """Raises DeviceLost if the device fails every call since an earlier error."""
        if self.pool.keys.is_cuda:
            try:
                torch.cuda.synchronize(self.pool.keys.device)
            except RuntimeError as error:
                raise DeviceLost(f"the CUDA device is lost: {error}") from error

    def forward(
        self, parts: Seq[TreeBatch], aux_states: AuxHiddenStates | None = None
    ) -> list[Tensor]:
        """Returns the hidden states of each part, [Tq, E] or [num_states, E].

        `aux_states` receives states between layers, for the same rows of all parts together.
        """
        inputs, batch = NodeInputs.cat([part.inputs for part in parts]), TreeBatch.merge(parts)
        rows = _rows_read(parts, self.pool.keys.device)
        with threads_for(len(inputs) * self._weights):
            hidden = self.compute(batch, inputs, rows, aux_states)
        if len(parts) == 1:
            return [hidden]
        return list(torch.split(hidden, [_num_states(part) for part in parts]))

    def compute(
        self,
        batch: TreeBatch,
        inputs: NodeInputs | Tensor,
        rows: Tensor | None = None,
        aux_states: AuxHiddenStates | None = None,
    ) -> Tensor:
        """Runs the network: the forward pass of prefills, searches and texts, captured or launched.

        The arguments and the result are those of `ModelAdapter.forward`.
        """
        attend = PagedAttention(batch, self.pool, self.adapter.activation, self.attention)
        return self.adapter.forward(inputs, batch, attend, rows, aux_states)


def _num_states(part: TreeBatch) -> int:
    return len(part.inputs) if part.num_states is None else part.num_states


def _rows_read(parts: Seq[TreeBatch], device: torch.device) -> Tensor | None:
    """Returns the rows whose hidden states are read. None reads all."""
    if all(part.num_states is None for part in parts):
        return None
    rows: list[int] = []
    stop = 0
    for part in parts:
        stop += len(part.inputs)
        rows += range(stop - _num_states(part), stop)
    return on_device(rows, device)
