"""Trees of one forward pass, and the addresses of the keys that they read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.tree import TokenTree


@dataclass(frozen=True)
class PrefixTable:
    """Roots of B trees as rows of one table, so that no shape depends on the root lengths.

    Tree b has the root `slots[rows[b], :lengths[b]]`. The rest of the row is never read.

    Attributes:
        slots: [R, W] pool slots of the tokens of R sequences, in order.
        rows: [B] row of each tree's root.
        lengths: [B] root tokens of each tree.
    """

    slots: Tensor
    rows: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class TreeBatch:
    """Trees of one forward pass, and the slot of every key that they read.

    Attributes:
        tree: All nodes: those computed now and those computed in an earlier forward pass.
        queries: [Tq] nodes computed now, ascending. None means all nodes.
        slots: [T] pool slot of each node. The forward pass writes the nodes in `queries` and reads
            the others.
        prefix_slots: Slots of each tree's root, in order, or a table of all roots.
        counts: [B] computed nodes of each tree. None means that the host does not know them.
        fillers: Number of last trees that only fill the batch up to a fixed size. They have no
            root, and no result of theirs is read.
    """

    tree: TokenTree
    queries: Tensor | None
    slots: Tensor
    prefix_slots: tuple[Tensor, ...] | PrefixTable
    counts: list[int] | None = None
    fillers: int = 0

    @property
    def num_queries(self) -> int:
        """Tq, the number of nodes computed now."""
        return self.tree.num_nodes if self.queries is None else self.queries.shape[0]

    def query_slots(self) -> Tensor:
        """Returns the slots [Tq] where the keys and values computed now are stored."""
        return self.slots if self.queries is None else self.slots[self.queries]

    def root_lengths(self) -> Tensor:
        """Returns the number of root tokens [B] of each tree."""
        if isinstance(self.prefix_slots, PrefixTable):
            return self.prefix_slots.lengths
        lengths = [slots.shape[0] for slots in self.prefix_slots]
        return on_device(lengths, self.slots.device)

    def positions(self) -> Tensor:
        """Returns the absolute position [Tq] of each computed node: root length + depth."""
        depths = self.tree.depths if self.queries is None else self.tree.depths[self.queries]
        if isinstance(self.prefix_slots, tuple) and len(self.prefix_slots) == 1:
            return depths + self.prefix_slots[0].shape[0]
        trees = self.tree.tree_ids()
        return depths + self.root_lengths()[trees if self.queries is None else trees[self.queries]]
