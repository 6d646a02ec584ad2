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
from recserve.kernels.tree import merge
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


@dataclass(frozen=True, kw_only=True)
class BatchSlice(TreeBatch):
    """Trees of some sequences with the inputs of their nodes, as one part of a forward pass.

    A forward pass of one part reads it as it is. Several parts are packed into one `TreeBatch`.

    Attributes:
        prefix_slots: For each tree the slots of the root that it hangs under.
        inputs: Input rows of the nodes computed now.
        num_states: Number of computed nodes, from the end, whose hidden states are read. The others
            only write keys and values. None reads all. Only prefills, which are chains, have it.
    """

    prefix_slots: tuple[Tensor, ...]
    inputs: NodeInputs
    num_states: int | None = None


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
        pieces: Seq[BatchSlice],
        taps: AuxHiddenStates | None = None,
        masks: GatedLora | None = None,
    ) -> list[Tensor]:
        """Returns the hidden states of each piece, [Tq, E] or [num_states, E].

        `taps` receives states between layers, for the same rows of all pieces together. `masks`
        holds the mask tokens that the trees may have.
        """
        inputs, batch = NodeInputs.cat([piece.inputs for piece in pieces]), pack(pieces)
        rows, gate = _read(pieces, self.pool.keys.device), None
        if masks is not None and batch.tree.kinds is not None:
            kinds = batch.tree.kinds
            gate = MaskRows.of(masks, kinds if batch.queries is None else kinds[batch.queries])
        hidden = self.hidden(batch, inputs, rows, taps, gate)
        if len(pieces) == 1:
            return [hidden]
        return list(torch.split(hidden, [_num_states(piece) for piece in pieces]))

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


def _num_states(piece: BatchSlice) -> int:
    return len(piece.inputs) if piece.num_states is None else piece.num_states


def _read(pieces: Seq[BatchSlice], device: torch.device) -> Tensor | None:
    """Returns the rows whose hidden states are read. None reads all."""
    if all(piece.num_states is None for piece in pieces):
        return None
    rows: list[int] = []
    stop = 0
    for piece in pieces:
        stop += len(piece.inputs)
        rows += range(stop - _num_states(piece), stop)
    return on_device(rows, device)


def pack(pieces: Seq[BatchSlice]) -> TreeBatch:
    """Returns all pieces as one batch."""
    if len(pieces) == 1:
        return pieces[0]
    queries = []
    start = 0
    for piece in pieces:
        nodes = piece.queries
        if nodes is None:
            nodes = torch.arange(piece.tree.num_nodes, device=piece.slots.device)
        queries.append(nodes + start)
        start += piece.tree.num_nodes
    return TreeBatch(
        merge([piece.tree for piece in pieces]),
        torch.cat(queries),
        torch.cat([piece.slots for piece in pieces]),
        tuple(slots for piece in pieces for slots in piece.prefix_slots),
        _counts(pieces),
    )


def _counts(pieces: Seq[BatchSlice]) -> list[int] | None:
    counts: list[int] = []
    for piece in pieces:
        if piece.counts is None:
            return None
        counts += piece.counts
    return counts
