"""The catalogue's trie on the device: every existing semantic id, as arrays.

Nodes are numbered breadth-first and, within a level, in lexicographic order of their prefixes. This
has two consequences. The children of a node are consecutive node numbers. The items under a node
are a consecutive range of leaf ranks. So the number of allowed items under a prefix is a difference
of two prefix sums, at any node and for any filter.

    0 -+- 1 -+- 3    ids (0, 2), (0, 5), (1, 4)     first_child  1 3 5 6 6 6 6
       |     +- 4    node_codes  0 0 1 2 5 4        first_leaf   0 0 2 0 1 2
       +- 2 --- 5    parents     0 0 0 1 1 2        last_leaf    3 2 3 1 2 3

Source for the layout's aim (cost independent of catalogue size): STATIC, arXiv 2602.22647.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.trie.native_trie import BaseArrays, NativeTrie


@dataclass(frozen=True)
class Children:
    """Children of n nodes, padded to the widest of them.

    Attributes:
        nodes: [n, M] node numbers, 0 where padded.
        codes: [n, M] code at the child's level, 0 where padded.
        valid: [n, M] false where padded.
    """

    nodes: Tensor
    codes: Tensor
    valid: Tensor


@dataclass(frozen=True)
class Leaves:
    """Leaf ranks under nodes: the range `first : last` of each node, any shape."""

    first: Tensor
    last: Tensor


@dataclass(frozen=True)
class Trie:
    """Prefix tree of all semantic ids of one catalogue version.

    `TrieOverlay` has the same methods for a catalogue that changes. Code that accepts both takes a
    `TrieView` and calls the methods instead of reading the arrays. Methods take nodes or rows of
    any shape unless said otherwise; results have the same shape.

    Attributes:
        first_child: [nodes + 1]. Children of node p are `first_child[p] : first_child[p + 1]`. Node
            0 is the empty prefix. Leaves have no children.
        parents: [nodes] the node one code shorter (0 at node 0).
        node_codes: [nodes] the last code of the node's prefix (0 at node 0).
        first_leaf: [nodes]. Items under the node have leaf ranks `first_leaf : last_leaf`.
        last_leaf: [nodes].
        leaf_items: [I] item row at each leaf rank.
        item_leaves: [rows] leaf rank of each item row, -1 for a row without a leaf.
        level_starts: Level l has the nodes `level_starts[l] : level_starts[l + 1]`. Level 0 is node
            0 alone, level L holds the leaves.
        codebook_sizes: C of each level.
    """

    first_child: Tensor
    parents: Tensor
    node_codes: Tensor
    first_leaf: Tensor
    last_leaf: Tensor
    leaf_items: Tensor
    item_leaves: Tensor
    level_starts: tuple[int, ...]
    codebook_sizes: tuple[int, ...]

    @property
    def num_levels(self) -> int:
        """L, including the disambiguation level."""
        return len(self.codebook_sizes)

    @property
    def num_items(self) -> int:
        """I, the number of items (= leaves)."""
        return self.leaf_items.shape[0]

    @property
    def num_rows(self) -> int:
        """Item rows of the catalogue version; more than items where rows were replaced."""
        return self.item_leaves.shape[0]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, including the empty prefix."""
        return self.node_codes.shape[0]

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Number of nodes of each level, the empty prefix first."""
        starts = self.level_starts
        return tuple(stop - start for start, stop in zip(starts[:-1], starts[1:], strict=True))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Most children of a node of each level 0 : L."""
        counts, starts = self.first_child.diff(), self.level_starts
        parts = [counts[start:stop].max() for start, stop in pairwise(starts[:-1])]
        return tuple(torch.stack(parts).tolist())

    @cached_property
    def closing_level(self) -> int:
        """The level, at least 1, from which fewer and fewer nodes have several items.

        Reads the device once per trie.
        """
        starts, many = self.level_starts, self.last_leaf - self.first_leaf > 1
        counts = [int(many[a:b].sum()) for a, b in pairwise(starts[1:])]
        level = len(counts)
        while level > 1 and counts[level - 1] <= counts[level - 2]:
            level -= 1
        return level

    @property
    def any_leaf(self) -> int:
        """Any node of level L."""
        return self.level_starts[self.num_levels]

    @property
    def base(self) -> Trie:
        """This trie."""
        return self

    @property
    def overlay(self) -> None:
        """None, because nothing has changed since this trie was built."""
        return None

    @property
    def leaf_rows(self) -> Tensor:
        """[I] item row at each leaf rank."""
        return self.leaf_items

    @property
    def device(self) -> torch.device:
        """Device of the arrays."""
        return self.first_child.device

    @cached_property
    def edges(self) -> Tensor:
        """[nodes] `parent * largest codebook + code` of each node, ascending; -1 at node 0."""
        edges = self.parents.long() * max(self.codebook_sizes) + self.node_codes
        edges[0] = -1
        fits = self.num_nodes * max(self.codebook_sizes) < 2**31
        return edges.to(torch.int32) if fits else edges

    @property
    def arrays(self) -> BaseArrays:
        """Arrays that the C sources read."""
        return BaseArrays(self.first_child, self.node_codes, self.first_leaf, self.last_leaf)

    @cached_property
    def native(self) -> NativeTrie:
        """Addresses for the C sources; on a CPU."""
        return NativeTrie(self.arrays, self.any_leaf)

    def num_children(self, nodes: Tensor) -> Tensor:
        """Returns the number of children of each node."""
        return self.first_child[nodes + 1] - self.first_child[nodes]

    def codes_of(self, nodes: Tensor) -> Tensor:
        """Returns the last code of each node's prefix."""
        return self.node_codes[nodes]

    def parents_of(self, nodes: Tensor) -> Tensor:
        """Returns the node one code shorter."""
        return self.parents[nodes]

    def places(self, nodes: Tensor, parents: Tensor) -> Tensor:
        """Returns the column of each node in `children` of its parent."""
        return nodes - self.first_child[parents]

    def leaves(self, nodes: Tensor) -> Leaves:
        """Returns the leaf ranks under each node."""
        return Leaves(self.first_leaf[nodes], self.last_leaf[nodes])

    def base_leaves(self, nodes: Tensor) -> Leaves:
        """Returns the base's leaf ranks under each node, which are all of them."""
        return self.leaves(nodes)

    def leaf_nodes(self, rows: Tensor) -> Tensor:
        """Returns the leaf node of each item row, -1 without one."""
        ranks = self.item_leaves[rows].long()
        return torch.where(ranks >= 0, ranks + self.any_leaf, -1)

    def leaf_ranks(self, rows: Tensor) -> Tensor:
        """Returns the leaf rank of each item row."""
        return self.item_leaves[rows]

    def children(self, nodes: Tensor, width: int | None = None) -> Children:
        """Returns all children of each node.

        Args:
            nodes: [n].
            width: Pads to this many children without a host sync. None pads to the widest of the
                nodes.
        """
        first = self.first_child[nodes]
        count = self.first_child[nodes + 1] - first
        if width is None:
            width = int(count.max()) if count.numel() else 0
        step = torch.arange(width, device=self.device)
        valid = step[None, :] < count[:, None]
        child = torch.where(valid, first[:, None] + step[None, :], 0)
        return Children(child, self.node_codes[child], valid)

    def levels(self, nodes: Tensor) -> Tensor:
        """Returns the level of each node, 0 for the empty prefix."""
        starts = on_device(self.level_starts[1:], self.device)
        return torch.bucketize(nodes, starts, right=True)

    def nodes_of_items(self, rows: Tensor) -> Tensor:
        """Returns the node [n, L] of each prefix of each item's semantic id. rows: [n]."""
        return self.nodes_of_leaves(self.item_leaves[rows])

    def nodes_of_leaves(self, leaves: Tensor) -> Tensor:
        """Returns the node [n, L] of each prefix of the id at each leaf rank. leaves: [n]."""
        columns = []
        for level in range(1, self.num_levels + 1):
            start, stop = self.level_starts[level], self.level_starts[level + 1]
            rank = torch.searchsorted(self.first_leaf[start:stop], leaves, right=True) - 1
            columns.append(rank + start)
        return torch.stack(columns, dim=-1)

    def items_of_leaves(self, nodes: Tensor) -> Tensor:
        """Returns the item row of each leaf node (a node of level L)."""
        return self.leaf_items[nodes - self.level_starts[self.num_levels]]

    def to(self, device: torch.device | str) -> Trie:
        """Returns the same trie on another device."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, column in columns.items():
            columns[name] = column.to(device) if isinstance(column, Tensor) else column
        return Trie(**columns)


def build_trie(
    codes: Tensor,
    codebook_sizes: tuple[int, ...],
    rows: Tensor | None = None,
    num_rows: int | None = None,
) -> Trie:
    """Builds the trie of all rows of `codes`.

    Node arrays are int32. Only values computed from them are int64.

    Args:
        codes: [I, L] int, distinct semantic ids.
        codebook_sizes: C of each level.
        rows: [I] item row of each. None means 0 .. I-1.
        num_rows: Number of item rows. None means I.

    Raises:
        ValueError: If two items share a semantic id, a code is out of range, or there are no items.
    """
    items, levels = codes.shape
    if items == 0:
        raise ValueError("a trie needs at least one item; the catalogue is empty")
    if len(codebook_sizes) != levels:
        raise ValueError(f"codes have {levels} levels, codebook_sizes names {len(codebook_sizes)}")
    codes = codes.to(torch.int64)
    for level, size in enumerate(codebook_sizes):
        low, high = int(codes[:, level].min()), int(codes[:, level].max())
        if low < 0 or high >= size:
            raise ValueError(
                f"codes of level {level} span {low}..{high}; the codebook holds {size}"
            )
    order = lexicographic_order(codes, codebook_sizes)
    ranked = codes[order]
    opens = torch.zeros(items, dtype=torch.bool)
    opens[0] = True
    starts = [torch.zeros(1, dtype=torch.int64)]  # first leaf of each node, per level
    node_codes = [torch.zeros(1, dtype=torch.int64)]
    for level in range(levels):
        opens[1:] |= ranked[1:, level] != ranked[:-1, level]
        first = opens.nonzero().flatten()
        starts.append(first)
        node_codes.append(ranked[first, level])
    if starts[-1].shape[0] != items:
        raise ValueError("two items share a semantic id; add a disambiguation level first")
    level_starts = [0]
    for first in starts:
        level_starts.append(level_starts[-1] + first.shape[0])
    # A node's first child is the node of the next level that starts at the same leaf.
    firsts = [
        torch.searchsorted(starts[level + 1], starts[level]) + level_starts[level + 1]
        for level in range(levels)
    ]
    above = [torch.zeros(1, dtype=torch.int64)]
    for level in range(levels):
        opened = torch.searchsorted(starts[level], starts[level + 1], right=True) - 1
        above.append(opened + level_starts[level])
    leaves = torch.full((items + 1,), level_starts[-1], dtype=torch.int64)
    lasts = [torch.cat([first[1:], first.new_tensor([items])]) for first in starts]
    leaf_items = order if rows is None else rows.to(torch.int64)[order]
    item_leaves = torch.full((num_rows or items,), -1, dtype=torch.int64)
    item_leaves[leaf_items] = torch.arange(items)
    return Trie(
        torch.cat([*firsts, leaves]).to(torch.int32),
        torch.cat(above).to(torch.int32),
        torch.cat(node_codes).to(torch.int32),
        torch.cat(starts).to(torch.int32),
        torch.cat(lasts).to(torch.int32),
        leaf_items.to(torch.int32),
        item_leaves.to(torch.int32),
        tuple(level_starts),
        codebook_sizes,
    )


def lexicographic_order(codes: Tensor, codebook_sizes: tuple[int, ...]) -> Tensor:
    """Returns the order of rows: one sort if the codes fit in 63 bits, else one sort per level."""
    bits = 1
    for size in codebook_sizes:
        bits *= max(size, 1)
    if bits < 2**63:
        key = torch.zeros_like(codes[:, 0])
        for level, size in enumerate(codebook_sizes):
            key = key * size + codes[:, level]
        return torch.sort(key, stable=True).indices
    order = torch.arange(codes.shape[0], device=codes.device)
    for level in range(codes.shape[1] - 1, -1, -1):
        order = order[torch.sort(codes[order, level], stable=True).indices]
    return order
