"""The runner: one forward pass of one model over packed trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from recserve.kernels.attention.attention import BatchAttention, tree_attention
from recserve.kernels.attention.reference import SOFTMAX, Activation
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.host import on_device
from recserve.kernels.native.threads import threads_for
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.attention import Attend, PagedAttention
from recserve.models.decoder import AuxHiddenStates
from recserve.models.gated_lora import GatedLora, MaskRows
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.models.packing import row_weights
from recserve.models.ranker import Ranker
from recserve.models.semantic_id_model import Network, SemanticIdModel


class DeviceLost(RuntimeError):
    """The device of a model fails every call since an earlier error; only a new process helps."""


@dataclass(frozen=True)
class LayerInputs:
    """What the layers of a network read besides keys and values.

    Attributes:
        x: [Tq, E] embedded rows.
        rows: [R] rows whose states are read. None means all.
        aux_states: Receives the states of `rows` between the layers of a decoder.
        mask_rows: Rows of mask tokens of a language model. None: there are none.
        groups: [Tq] token groups of a ranker. None for other networks.
    """

    x: Tensor
    rows: Tensor | None = None
    aux_states: AuxHiddenStates | None = None
    mask_rows: MaskRows | None = None
    groups: Tensor | None = None


class ModelAdapter(Protocol):
    """What the runner needs of a network.

    Attributes:
        activation: Activation of the attention scores.
        model: The network.
    """

    activation: Activation

    @property
    def model(self) -> Network:
        """The network."""
        ...

    def embed(self, inputs: NodeInputs, mask_rows: MaskRows | None) -> Tensor:
        """Returns the embedded rows [Tq, E]; `mask_rows` names those of mask tokens."""
        ...

    def layers(self, inputs: LayerInputs, positions: Tensor, attend: Attend) -> Tensor:
        """Returns final hidden states [Tq, E] of rows at `positions` [Tq], or those [R, E] that
        are read.
        """
        ...


class DecoderAdapter:
    """A decoder over tokens: a history's items or codes, or a text."""

    activation = SOFTMAX

    def __init__(self, model: SemanticIdModel | LanguageModel) -> None:
        self.model = model
        decoder = model.config.decoder
        self.kv_shape = KVShape(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self.group = decoder.num_heads // decoder.num_kv_heads
        self.dtype: torch.dtype = model.tokens.weight.dtype
        self.device: torch.device = model.tokens.weight.device

    def embed(self, inputs: NodeInputs, mask_rows: MaskRows | None) -> Tensor:
        """Returns [Tq, E]."""
        x = self.model.embed(inputs.tokens)
        return x if mask_rows is None else mask_rows.embed(x)

    def layers(self, inputs: LayerInputs, positions: Tensor, attend: Attend) -> Tensor:
        """Returns [Tq, E], or [R, E] of the rows that are read."""
        x, rows, aux_states, mask_rows = inputs.x, inputs.rows, inputs.aux_states, inputs.mask_rows
        return self.model.decoder(x, positions, attend, rows, aux_states, mask_rows)  # type: ignore[no-any-return]


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

    def embed(self, inputs: NodeInputs, mask_rows: MaskRows | None) -> Tensor:
        """Returns [Tq, E]."""
        return self.model.embed(inputs)

    def layers(self, inputs: LayerInputs, positions: Tensor, attend: Attend) -> Tensor:
        """Returns [Tq, E], or [R, E] of the rows that are read."""
        assert inputs.aux_states is None and inputs.mask_rows is None
        return self.model(inputs.x, inputs.groups, attend, inputs.rows)  # type: ignore[no-any-return]


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
        self,
        parts: Seq[TreeBatch],
        aux_states: AuxHiddenStates | None = None,
        masks: GatedLora | None = None,
    ) -> list[Tensor]:
        """Returns the hidden states of each part, [Tq, E] or [num_states, E].

        `aux_states` receives states between layers, for the same rows of all parts together.
        `masks` holds the mask tokens that the trees may have.
        """
        inputs, batch = NodeInputs.cat([part.inputs for part in parts]), TreeBatch.merge(parts)
        rows, mask_rows = _rows_read(parts, self.pool.keys.device), None
        if masks is not None and batch.tree.kinds is not None:
            kinds = batch.tree.kinds
            mask_rows = MaskRows.of(masks, kinds if batch.queries is None else kinds[batch.queries])
        with threads_for(len(inputs) * self._weights):
            x = self.adapter.embed(inputs, mask_rows)
            hidden = self.layers(batch, LayerInputs(x, rows, aux_states, mask_rows, inputs.groups))
        if len(parts) == 1:
            return [hidden]
        return list(torch.split(hidden, [_num_states(part) for part in parts]))

    def layers(self, batch: TreeBatch, inputs: LayerInputs) -> Tensor:
        """Runs all layers: the forward pass of prefills, searches and texts, captured or launched.

        Args:
            batch: Trees, and where their keys and values lie.
            inputs: The embedded nodes that are computed now.

        Returns:
            [Tq, E] final hidden states, or [R, E] of the rows that are read.
        """
        attend = PagedAttention(batch, self.pool, self.adapter.activation, self.attention)
        return self.adapter.layers(inputs, batch.positions(), attend)


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
