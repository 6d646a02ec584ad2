"""A trie with semantic ids that were inserted after it was built.

The base trie does not change. Prefixes that it lacks are numbered after its own nodes,
breadth-first and lexicographically. So the children of a node are at most two ranges of node
numbers: those in the base and the later ones. Leaf ranks follow the merged order. A base leaf moves
up by the number of ids inserted before it, which is one binary search. The few nodes with inserted
ids below them are listed with their ranks. So the cost of a change does not depend on the
catalogue's size. Reading costs one binary search more than reading the base.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.trie.native_trie import NativeTrie, OverlayArrays
from recserve.kernels.trie.trie import Children, Leaves, Trie


@dataclass(frozen=True)
class Grown:
    """Nodes, also of the base, with inserted ids at or below them, ordered by node number.

    Attributes:
        nodes: [S] node numbers, ascending. The last K are the overlay's own.
        first: [S]. Leaf ranks under the node are `first : last`.
        last: [S].
        child_first: [S] first child of the node in the overlay.
        child_count: [S] number of its children in the overlay.
    """

    nodes: Tensor
    first: Tensor
    last: Tensor
    child_first: Tensor
    child_count: Tensor


@dataclass(frozen=True)
class BasePrefixes:
    """The prefixes of n semantic ids that the base already has.

    Attributes:
        rows: [n] item row of each id, ascending.
        nodes: [L + 1, n] node of each prefix, -1 for prefixes that the base lacks.
        first: [L + 1, n]. Base leaves under the prefix are `first : last`. For a missing prefix
            both are the number of base leaves before the id.
        last: [L + 1, n].
        depths: [n] number of codes of the longest prefix in the base.
    """

    rows: Tensor
    nodes: Tensor
    first: Tensor
    last: Tensor
    depths: Tensor

    def at(self, index: Tensor) -> BasePrefixes:
        """Returns the prefixes at the given indices [n] int64."""
        columns = (self.rows, self.nodes, self.first, self.last, self.depths)
        return BasePrefixes(*(column.index_select(-1, index) for column in columns))


@dataclass(frozen=True)
class TrieOverlay:
    """Base trie and m inserted semantic ids; methods as in `Trie`.

    Attributes:
        codes, parents: [K] of the overlay's own nodes.
        level_starts: [L + 1]. Its nodes of level l + 1 are `level_starts[l] : level_starts[l + 1]`,
            counted from 0.
        inserted: [m] base leaves before each inserted id.
        rows: [m] item row of each inserted id. paths [m, L]: node of each of its prefixes.
        taken_leaves: [t] base leaf ranks, ascending, that now belong to another row: taken_rows
            [t].
        row_leaves: Leaf node of each row that the base does not have, -1 without one.
        gone: Rows that must not be returned. None means that there are none.
        descent: Prefixes of all later ids, reused for the next version's overlay.
    """

    base: Trie
    grown: Grown
    codes: Tensor
    parents: Tensor
    level_starts: tuple[int, ...]
    inserted: Tensor
    rows: Tensor
    paths: Tensor
    taken_leaves: Tensor
    taken_rows: Tensor
    row_leaves: Tensor
    gone: Tensor | None
    descent: BasePrefixes

    @property
    def overlay(self) -> TrieOverlay:
        """This trie."""
        return self

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """C of each level."""
        return self.base.codebook_sizes

    @property
    def num_levels(self) -> int:
        """L, including the disambiguation level."""
        return self.base.num_levels

    @property
    def num_items(self) -> int:
        """Number of leaves, including those of hidden items."""
        return self.base.num_items + self.inserted.shape[0]

    @property
    def num_rows(self) -> int:
        """Item rows of the catalogue version."""
        return self.base.num_rows + self.row_leaves.shape[0]

    @property
    def num_nodes(self) -> int:
        """Nodes of base and overlay."""
        return self.base.num_nodes + self.codes.shape[0]

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes of each level, the empty prefix first."""
        base, own = self.base.level_sizes, self.level_starts
        return (1, *(n + own[i + 1] - own[i] for i, n in enumerate(base[1:])))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Most children of a node of each level 0 : L, or more; never more than there are codes."""
        more = int(self.grown.child_count.max()) if self.grown.nodes.shape[0] else 0
        sizes = self.base.codebook_sizes
        return tuple(min(n + more, c) for n, c in zip(self.base.widths, sizes, strict=True))

    @property
    def closing_level(self) -> int:
        """As in Trie; insertions hardly move it."""
        return self.base.closing_level

    @property
    def any_leaf(self) -> int:
        """A node of level L, whichever."""
        return self.base.any_leaf

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.base.device

    @cached_property
    def hidden(self) -> Tensor | None:
        """Ascending ranks of the leaves whose items must not be returned; None: there are none."""
        if self.gone is None:
            return None
        nodes = self.hidden_nodes
        return torch.sort(self.leaves(nodes).first).values if nodes.shape[0] else None

    @property
    def changed_rows(self) -> Tensor:
        """Item rows whose semantic ids are newer than the base, or had another owner in it."""
        return torch.cat([self.rows, self.taken_rows])

    @cached_property
    def inserted_ranks(self) -> Tensor:
        """Ascending leaf ranks of the inserted ids."""
        return self.inserted + torch.arange(self.inserted.shape[0], device=self.device)

    @cached_property
    def hidden_nodes(self) -> Tensor:
        """Leaf nodes of the hidden items, of those that still have their semantic ids."""
        if self.gone is None:
            return self.rows[:0]
        return self.leaf_nodes(self.gone)[self._gone_own]

    @cached_property
    def gone_on_host(self) -> Tensor | None:
        """The gone rows on the CPU."""
        return None if self.gone is None else self.gone.cpu()

    @cached_property
    def replaced(self) -> Tensor | None:
        """Those of `gone` that have no semantic id, so that no version's scores depend on them."""
        if self.gone is None:
            return None
        rows = self.gone[~self._gone_own]
        return rows if rows.shape[0] else None

    @cached_property
    def leaf_rows(self) -> Tensor:
        """[I] item row at each leaf rank, those of base and overlay merged."""
        base = self.base.leaf_items.long()
        base[self.taken_leaves] = self.taken_rows
        merged = torch.empty(self.num_items, dtype=torch.int64, device=self.device)
        kept = torch.ones(self.num_items, dtype=torch.bool, device=self.device)
        kept[self.inserted_ranks] = False
        merged[kept] = base
        merged[self.inserted_ranks] = self.rows
        return merged

    @cached_property
    def native(self) -> NativeTrie:
        """For the C sources; on a CPU."""
        own = OverlayArrays(**vars(self.grown), codes=self.codes, inserted=self.inserted)
        return NativeTrie(self.base.arrays, self.any_leaf, own)

    def num_children(self, nodes: Tensor) -> Tensor:
        """Branching of each node. nodes: any shape; same shape back."""
        first, count = self._base_children(nodes)
        place, hit = self._find(nodes)
        return count + torch.where(hit, self.grown.child_count[place], 0)

    def codes_of(self, nodes: Tensor) -> Tensor:
        """Last code of each node's prefix. nodes: any shape; same shape back."""
        return self._either(nodes, self.base.node_codes, self.codes)

    def parents_of(self, nodes: Tensor) -> Tensor:
        """The node one code shorter. nodes: any shape; same shape back."""
        return self._either(nodes, self.base.parents, self.parents)

    def places(self, nodes: Tensor, parents: Tensor) -> Tensor:
        """Column of each node in `children` of its parent. Same shapes; same shape back."""
        first, count = self._base_children(parents)
        place, _ = self._find(parents)
        later = nodes - self.grown.child_first[place] + count
        return torch.where(nodes < self.base.num_nodes, nodes - first, later)

    def leaves(self, nodes: Tensor) -> Leaves:
        """Leaf ranks under each node. nodes: any shape."""
        known = nodes.clamp(max=self.base.num_nodes - 1)
        first, last = self.base.first_leaf[known].long(), self.base.last_leaf[known].long()
        moved = torch.searchsorted(self.inserted, first, right=True)
        place, hit = self._find(nodes)
        return Leaves(
            torch.where(hit, self.grown.first[place], first + moved),
            torch.where(hit, self.grown.last[place], last + moved),
        )

    def base_leaves(self, nodes: Tensor) -> Leaves:
        """Leaf ranks of the base under each node; none under those that came later. nodes: any
        shape.
        """
        known, size = nodes.clamp(max=self.base.num_nodes - 1), self.base.num_nodes
        first, last = self.base.first_leaf[known], self.base.last_leaf[known]
        return Leaves(first, torch.where(nodes < size, last, first))

    def leaf_nodes(self, rows: Tensor) -> Tensor:
        """Leaf node of each item row, -1 where it has none. rows: any shape; same shape back."""
        known = self.base.num_rows
        leaf = self.base.item_leaves[rows.clamp(max=known - 1)].long()
        leaf = torch.where(leaf >= 0, leaf + self.base.any_leaf, -1)
        if not self.row_leaves.shape[0]:
            return leaf
        return torch.where(rows < known, leaf, self.row_leaves[(rows - known).clamp(min=0)])

    def leaf_ranks(self, rows: Tensor) -> Tensor:
        """Leaf rank of each item row, -1 where it has none. rows: any shape; same shape back."""
        nodes = self.leaf_nodes(rows)
        return torch.where(nodes >= 0, self.leaves(nodes.clamp(min=0)).first, -1)

    def children(self, nodes: Tensor, width: int | None = None) -> Children:
        """All children of each node, those of the base first.

        nodes: [n]. width: pad to this many children (no host sync); None: the widest of these
        nodes.
        """
        first, count = self._base_children(nodes)
        place, hit = self._find(nodes)
        total = count + torch.where(hit, self.grown.child_count[place], 0)
        if width is None:
            width = int(total.max()) if total.numel() else 0
        step = torch.arange(width, device=self.device)
        valid = step < total[:, None]
        later = (self.grown.child_first[place] - count)[:, None] + step
        child = torch.where(step < count[:, None], first[:, None] + step, later)
        child = torch.where(valid, child, 0)
        return Children(child, self.codes_of(child), valid)

    def levels(self, nodes: Tensor) -> Tensor:
        """Level of each node, 0 for the empty prefix. nodes: any shape; same shape back."""
        size = self.base.num_nodes
        starts = on_device(self.level_starts, self.device)
        own = torch.bucketize(nodes - size, starts, right=True)
        return torch.where(nodes < size, self.base.levels(nodes.clamp(max=size - 1)), own)

    def nodes_of_items(self, rows: Tensor) -> Tensor:
        """[n, L] the node of each prefix of each item's semantic id. rows: [n] item rows."""
        leaves = self.leaf_nodes(rows)
        ranks = (leaves - self.base.any_leaf).clamp(0, self.base.num_items - 1)
        nodes = self.base.nodes_of_leaves(ranks)
        if not self.paths.shape[0]:
            return nodes
        own = self.paths[(leaves - self._own_leaves).clamp(min=0)]
        return torch.where((leaves >= self.base.num_nodes)[:, None], own, nodes)

    def items_of_leaves(self, nodes: Tensor) -> Tensor:
        """Item row of each leaf node (a node of level L)."""
        ranks = (nodes - self.base.any_leaf).clamp(0, self.base.num_items - 1)
        rows = self.base.leaf_items[ranks].long()
        if self.taken_leaves.shape[0]:
            place = torch.searchsorted(self.taken_leaves, ranks)
            place = place.clamp(max=self.taken_leaves.shape[0] - 1)
            rows = torch.where(self.taken_leaves[place] == ranks, self.taken_rows[place], rows)
        if not self.rows.shape[0]:
            return rows
        own = self.rows[(nodes - self._own_leaves).clamp(min=0)]
        return torch.where(nodes < self.base.num_nodes, rows, own)

    @property
    def _own_leaves(self) -> int:
        """Node number of the first inserted id."""
        return self.base.num_nodes + self.level_starts[self.num_levels - 1]

    @cached_property
    def _gone_own(self) -> Tensor:
        """Whether each gone row still has its semantic id."""
        assert self.gone is not None
        nodes = self.leaf_nodes(self.gone)
        return (nodes >= 0) & (self.items_of_leaves(nodes.clamp(min=self.any_leaf)) == self.gone)

    def _base_children(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """First child of each node in the base, and how many; none of the overlay's own nodes."""
        size = self.base.num_nodes
        first = self.base.first_child[nodes.clamp(max=size)].long()
        return first, self.base.first_child[(nodes + 1).clamp(max=size)] - first

    def _find(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Place of each node in `grown`, and whether it is there."""
        place = torch.searchsorted(self.grown.nodes, nodes.contiguous())
        place = place.clamp(max=self.grown.nodes.shape[0] - 1)
        return place, self.grown.nodes[place] == nodes

    def _either(self, nodes: Tensor, base: Tensor, own: Tensor) -> Tensor:
        """A column of the nodes, from whichever trie has them."""
        size = base.shape[0]
        values = base[nodes.clamp(max=size - 1)].long()
        if not own.shape[0]:
            return values
        return torch.where(nodes < size, values, own[(nodes - size).clamp(min=0)])
