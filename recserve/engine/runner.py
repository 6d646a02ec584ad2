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

    def embed(self, inputs: NodeInputs, gate: MaskRows | None) -> Tensor:
        """Returns the embedded rows [Tq, E]. `gate` names the rows of mask tokens of a language
        model.
        """
        ...

    def layers(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None,
        taps: AuxHiddenStates | None,
        gate: MaskRows | None,
        groups: Tensor | None,
    ) -> Tensor:
        """Returns final hidden states [Tq, E] of embedded rows, or [R, E] of the given rows [R].

        `taps` receives states between layers, where the network has a decoder. `groups` [Tq] are
        the token groups of a ranker.
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

    def embed(self, inputs: NodeInputs, gate: MaskRows | None) -> Tensor:
        """Returns [Tq, E]."""
        x = self.model.embed(inputs.tokens)
        return x if gate is None else gate.embed(x)

    def layers(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None,
        taps: AuxHiddenStates | None,
        gate: MaskRows | None,
        groups: Tensor | None,
    ) -> Tensor:
        """Returns [Tq, E], or [R, E] of the given rows."""
        hidden: Tensor = self.model.decoder(x, positions, attend, rows, taps, gate)
        return hidden


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

    def embed(self, inputs: NodeInputs, gate: MaskRows | None) -> Tensor:
        """Returns [Tq, E]."""
        return self.model.embed(inputs)

    def layers(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None,
        taps: AuxHiddenStates | None,
        gate: MaskRows | None,
        groups: Tensor | None,
    ) -> Tensor:
        """Returns [Tq, E], or [R, E] of the given rows."""
        assert groups is not None and taps is None and gate is None
        return self.model(x, groups, attend, rows)  # type: ignore[no-any-return]


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
        x = self.adapter.embed(inputs, gate)
        hidden = self.layers(batch, x, rows, taps, gate, inputs.groups)
        if len(parts) == 1:
            return [hidden]
        return list(torch.split(hidden, [_num_states(part) for part in parts]))

    def layers(
        self,
        batch: TreeBatch,
        x: Tensor,
        rows: Tensor | None = None,
        taps: AuxHiddenStates | None = None,
        gate: MaskRows | None = None,
        groups: Tensor | None = None,
    ) -> Tensor:
        """Runs all layers: the forward pass of prefills, searches and texts, captured or launched.

        Args:
            batch: Trees, and where their keys and values lie.
            x: [Tq, E] embedded inputs of the computed nodes.
            rows: [R] computed nodes whose states to return. None means all.
            taps: Receives the states of `rows` between layers.
            gate: Rows of mask tokens.
            groups: [Tq] token groups of a ranker.

        Returns:
            [Tq, E] final hidden states, or [R, E].
        """
        attend = PagedAttention(batch, self.pool, self.adapter.activation, self.attention)
        return self.adapter.layers(x, batch.positions(), attend, rows, taps, gate, groups)


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
