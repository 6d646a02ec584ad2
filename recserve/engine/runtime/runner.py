"""One forward of one model over packed trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.host import on_device
from recserve.kernels.paged_kv import KVPool, TreeBatch
from recserve.kernels.reference import Activation
from recserve.kernels.tree import TokenTree, merge
from recserve.models.attention import Attend, PagedAttention
from recserve.models.inputs import NodeInputs


class Trunk(Protocol):
    """What the runner needs of a network; engine/runtime/networks.py adapts the models to it."""

    activation: Activation

    def hidden(
        self, inputs: NodeInputs, positions: Tensor, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        """Packed rows to final hidden states [Tq, E], or [R, E] of the given rows [R]."""
        ...


@dataclass(frozen=True)
class Piece:
    """Trees of some sequences, placed: what goes into a forward beside other pieces.

    slots [T]: pool slot of each node. root_slots: for each tree the slots of the root it stands on.
    num_states: only the states of so many computed nodes, the last ones, are read, and the others
    leave keys and values; None: all. counts [B]: computed nodes of each tree, None: the host does
    not know.
    """

    tree: TokenTree
    inputs: NodeInputs
    queries: Tensor | None
    slots: Tensor
    root_slots: tuple[Tensor, ...]
    num_states: int | None = None
    counts: list[int] | None = None


class Runner:
    """A network and its pool. attention: how the nodes of a batch attend."""

    def __init__(
        self,
        trunk: Trunk,
        pool: KVPool,
        attention: dispatch.BatchAttention = dispatch.tree_attention,
    ) -> None:
        self.trunk = trunk
        self.pool = pool
        self.attention = attention

    def forward(self, pieces: Seq[Piece]) -> list[Tensor]:
        """Hidden states of each piece, [Tq, E] or [num_states, E]."""
        inputs = NodeInputs.cat([piece.inputs for piece in pieces])
        hidden = self.hidden(pack(pieces), inputs, _read(pieces, self.pool.keys.device))
        if len(pieces) == 1:
            return [hidden]
        return list(torch.split(hidden, [_num_states(piece) for piece in pieces]))

    def hidden(self, batch: TreeBatch, inputs: NodeInputs, rows: Tensor | None = None) -> Tensor:
        """Hidden states of all computed nodes [Tq, E], or of the given rows [R, E]."""
        attend = PagedAttention(batch, self.pool, self.trunk.activation, self.attention)
        return self.trunk.hidden(inputs, batch.positions(), attend, rows)


def _num_states(piece: Piece) -> int:
    return len(piece.inputs) if piece.num_states is None else piece.num_states


def _read(pieces: Seq[Piece], device: torch.device) -> Tensor | None:
    """Rows whose hidden states are read; None: all."""
    if all(piece.num_states is None for piece in pieces):
        return None
    rows: list[int] = []
    stop = 0
    for piece in pieces:
        stop += len(piece.inputs)
        rows += range(stop - _num_states(piece), stop)
    return on_device(rows, device)


def pack(pieces: Seq[Piece]) -> TreeBatch:
    """All pieces as one batch."""
    if len(pieces) == 1:
        only = pieces[0]
        return TreeBatch(only.tree, only.queries, only.slots, only.root_slots, only.counts)
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
        tuple(slots for piece in pieces for slots in piece.root_slots),
        _counts(pieces),
    )


def _counts(pieces: Seq[Piece]) -> list[int] | None:
    counts: list[int] = []
    for piece in pieces:
        if piece.counts is None:
            return None
        counts += piece.counts
    return counts
