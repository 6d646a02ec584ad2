"""One forward of one model over packed trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.paged_kv import KVPool, TreeBatch
from recserve.kernels.reference import Activation
from recserve.kernels.tree import TokenTree, merge
from recserve.models.attention import Attend
from recserve.models.inputs import NodeInputs


class Trunk(Protocol):
    """What the runner needs of a network; engine/networks.py adapts the models to it."""

    activation: Activation

    def hidden(self, inputs: NodeInputs, positions: Tensor, attend: Attend) -> Tensor:
        """Packed rows to final hidden states [Tq, E]."""
        ...


@dataclass(frozen=True)
class Piece:
    """Trees of some sequences, placed: what goes into a forward beside other pieces.

    slots [T]: pool slot of each node. root_slots: for each tree the slots of the root it stands on.
    """

    tree: TokenTree
    inputs: NodeInputs
    queries: Tensor | None
    slots: Tensor
    root_slots: tuple[Tensor, ...]


class Runner:
    """A network and its pool."""

    def __init__(self, trunk: Trunk, pool: KVPool) -> None:
        self.trunk = trunk
        self.pool = pool

    def forward(self, pieces: Seq[Piece]) -> list[Tensor]:
        """Hidden states of the computed nodes of each piece, [Tq, E] each."""
        batch = pack(pieces)
        attention = dispatch.tree_attention(batch, self.trunk.activation)
        slots, pool = batch.query_slots(), self.pool

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            pool.write(layer, slots, key, value)
            return attention(query, key, value, pool.keys[layer], pool.values[layer])

        inputs = NodeInputs.cat([piece.inputs for piece in pieces])
        hidden = self.trunk.hidden(inputs, batch.positions(), attend)
        return list(torch.split(hidden, [len(piece.inputs) for piece in pieces]))


def pack(pieces: Seq[Piece]) -> TreeBatch:
    """All pieces as one batch."""
    if len(pieces) == 1:
        only = pieces[0]
        return TreeBatch(only.tree, only.queries, only.slots, only.root_slots)
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
    )
