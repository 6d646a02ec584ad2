"""The runner: one forward pass of one model over packed trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from recserve.kernels.attention.attention import BatchAttention, tree_attention
from recserve.kernels.attention.reference import SOFTMAX, Activation
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.host import on_device
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.attention import Attend, PagedAttention
from recserve.models.decoder import AuxHiddenStates
from recserve.models.drafters.gated_lora import GatedLora, MaskRows
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.models.ranker import Ranker
from recserve.models.recommender import Recommender


class DeviceLost(RuntimeError):
    """The device of a model fails every call since an earlier error; only a new process helps."""


class ModelAdapter(Protocol):
    """What the runner needs of a network.

    Attributes:
        activation: Activation of the attention scores.
    """

    activation: Activation

    def hidden(
        self,
        inputs: NodeInputs,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None,
        taps: AuxHiddenStates | None = None,
        gate: MaskRows | None = None,
    ) -> Tensor:
        """Returns final hidden states [Tq, E] of packed rows, or [R, E] of the given rows [R].

        `taps` receives states between layers, where the network has a decoder. `gate` names the
        rows of mask tokens, where the network is a language model.
        """
        ...


class DecoderAdapter:
    """A decoder over tokens: a history's items or codes, or a text."""

    activation = SOFTMAX

    def __init__(self, model: Recommender | LanguageModel) -> None:
        self.model = model
        decoder = model.config.decoder
        self.kv_shape = KVShape(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self.group = decoder.num_heads // decoder.num_kv_heads
        self.dtype: torch.dtype = model.tokens.weight.dtype
        self.device: torch.device = model.tokens.weight.device

    def hidden(
        self,
        inputs: NodeInputs,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None,
        taps: AuxHiddenStates | None = None,
        gate: MaskRows | None = None,
    ) -> Tensor:
        """Returns [Tq, E], or [R, E] of the given rows."""
        given = {} if gate is None else {"gate": gate}
        return self.model(inputs.tokens, positions, attend, rows, taps, **given)  # type: ignore[no-any-return]


class RankerAdapter:
    """HSTU-style layers over profile, history and candidate rows. The rows carry their
    positions.
    """

    def __init__(self, model: Ranker) -> None:
        self.model = model
        config = model.config
        self.activation = Activation(config.normalizer)
        self.kv_shape = KVShape(config.num_layers, config.num_heads, config.head_dim)
        self.group = 1
        self.dtype: torch.dtype = model.vector_projection.weight.dtype
        self.device: torch.device = model.vector_projection.weight.device

    def hidden(
        self,
        inputs: NodeInputs,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None,
        taps: AuxHiddenStates | None = None,
        gate: MaskRows | None = None,
    ) -> Tensor:
        """Returns [Tq, E], or [R, E] of the given rows."""
        assert inputs.groups is not None and taps is None and gate is None
        return self.model(self.model.embed(inputs), inputs.groups, attend, rows)  # type: ignore[no-any-return]


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

    def check_device(self) -> None:
        """Raises DeviceLost if the device fails every call since an earlier error."""
        if self.pool.keys.is_cuda:
            try:
                torch.cuda.synchronize(self.pool.keys.device)
            except RuntimeError as error:
                raise DeviceLost(f"the CUDA device is lost: {error}") from error

    def forward(
        self,
        parts: Seq[TreeBatch],
        taps: AuxHiddenStates | None = None,
        masks: GatedLora | None = None,
    ) -> list[Tensor]:
        """Returns the hidden states of each part, [Tq, E] or [num_states, E].

        `taps` receives states between layers, for the same rows of all parts together. `masks`
        holds the mask tokens that the trees may have.
        """
        inputs, batch = NodeInputs.cat([part.inputs for part in parts]), TreeBatch.merged(parts)
        rows, gate = _rows_read(parts, self.pool.keys.device), None
        if masks is not None and batch.tree.kinds is not None:
            kinds = batch.tree.kinds
            gate = MaskRows.of(masks, kinds if batch.queries is None else kinds[batch.queries])
        hidden = self.hidden(batch, inputs, rows, taps, gate)
        if len(parts) == 1:
            return [hidden]
        return list(torch.split(hidden, [_num_states(part) for part in parts]))

    def hidden(
        self,
        batch: TreeBatch,
        inputs: NodeInputs,
        rows: Tensor | None = None,
        taps: AuxHiddenStates | None = None,
        gate: MaskRows | None = None,
    ) -> Tensor:
        """Returns the hidden states of all computed nodes [Tq, E], or of the given rows [R, E]."""
        attend = PagedAttention(batch, self.pool, self.adapter.activation, self.attention)
        return self.adapter.hidden(inputs, batch.positions(), attend, rows, taps, gate)


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
