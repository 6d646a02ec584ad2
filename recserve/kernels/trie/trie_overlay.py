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
        """Number of nodes of base and overlay."""
        return self.base.num_nodes + self.codes.shape[0]

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Number of nodes of each level, the empty prefix first."""
        base, own = self.base.level_sizes, self.level_starts
        return (1, *(n + own[i + 1] - own[i] for i, n in enumerate(base[1:])))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Upper bounds of the children of a node of each level 0 : L."""
        more = int(self.grown.child_count.max()) if self.grown.nodes.shape[0] else 0
        sizes = self.base.codebook_sizes
        return tuple(min(n + more, c) for n, c in zip(self.base.widths, sizes, strict=True))

    @property
    def closing_level(self) -> int:
        """As in Trie; insertions hardly change it."""
        return self.base.closing_level

    @property
    def any_leaf(self) -> int:
        """Any node of level L."""
        return self.base.any_leaf

    @property
    def device(self) -> torch.device:
        """Device of the arrays."""
        return self.base.device

    @cached_property
    def hidden(self) -> Tensor | None:
        """Ascending leaf ranks of items that must not be returned. None if there are none."""
        if self.gone is None:
            return None
        nodes = self.hidden_nodes
        return torch.sort(self.leaves(nodes).first).values if nodes.shape[0] else None

    @property
    def changed_rows(self) -> Tensor:
        """Item rows whose semantic ids are newer than the base, or belonged to another row."""
        return torch.cat([self.rows, self.taken_rows])

    @cached_property
    def inserted_ranks(self) -> Tensor:
        """Ascending leaf ranks of the inserted ids."""
        return self.inserted + torch.arange(self.inserted.shape[0], device=self.device)

    @cached_property
    def hidden_nodes(self) -> Tensor:
        """Leaf nodes of the hidden items that still have their semantic ids."""
        if self.gone is None:
            return self.rows[:0]
        return self.leaf_nodes(self.gone)[self._gone_own]

    @cached_property
    def gone_on_host(self) -> Tensor | None:
        """The gone rows on the CPU."""
        return None if self.gone is None else self.gone.cpu()

    @cached_property
    def replaced(self) -> Tensor | None:
        """Rows of `gone` without a semantic id, so that no version's scores depend on them."""
        if self.gone is None:
            return None
        rows = self.gone[~self._gone_own]
        return rows if rows.shape[0] else None

    @cached_property
    def leaf_rows(self) -> Tensor:
        """[I] item row at each leaf rank, base and overlay merged."""
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
        """Addresses for the C sources; on a CPU."""
        own = OverlayArrays(**vars(self.grown), codes=self.codes, inserted=self.inserted)
        return NativeTrie(self.base.arrays, self.any_leaf, own)

    def num_children(self, nodes: Tensor) -> Tensor:
        """Returns the number of children of each node."""
        first, count = self._base_children(nodes)
        place, hit = self._find(nodes)
        return count + torch.where(hit, self.grown.child_count[place], 0)

    def codes_of(self, nodes: Tensor) -> Tensor:
        """Returns the last code of each node's prefix."""
        return self._either(nodes, self.base.node_codes, self.codes)

    def parents_of(self, nodes: Tensor) -> Tensor:
        """Returns the node one code shorter."""
        return self._either(nodes, self.base.parents, self.parents)

    def places(self, nodes: Tensor, parents: Tensor) -> Tensor:
        """Returns the column of each node in `children` of its parent."""
        first, count = self._base_children(parents)
        place, _ = self._find(parents)
        later = nodes - self.grown.child_first[place] + count
        return torch.where(nodes < self.base.num_nodes, nodes - first, later)

    def leaves(self, nodes: Tensor) -> Leaves:
        """Returns the leaf ranks under each node."""
        known = nodes.clamp(max=self.base.num_nodes - 1)
        first, last = self.base.first_leaf[known].long(), self.base.last_leaf[known].long()
        moved = torch.searchsorted(self.inserted, first, right=True)
        place, hit = self._find(nodes)
        return Leaves(
            torch.where(hit, self.grown.first[place], first + moved),
            torch.where(hit, self.grown.last[place], last + moved),
        )

    def base_leaves(self, nodes: Tensor) -> Leaves:
        """Returns the base's leaf ranks under each node; later nodes have none."""
        known, size = nodes.clamp(max=self.base.num_nodes - 1), self.base.num_nodes
        first, last = self.base.first_leaf[known], self.base.last_leaf[known]
        return Leaves(first, torch.where(nodes < size, last, first))

    def leaf_nodes(self, rows: Tensor) -> Tensor:
        """Returns the leaf node of each item row, -1 without one."""
        known = self.base.num_rows
        leaf = self.base.item_leaves[rows.clamp(max=known - 1)].long()
        leaf = torch.where(leaf >= 0, leaf + self.base.any_leaf, -1)
        if not self.row_leaves.shape[0]:
            return leaf
        return torch.where(rows < known, leaf, self.row_leaves[(rows - known).clamp(min=0)])

    def leaf_ranks(self, rows: Tensor) -> Tensor:
        """Returns the leaf rank of each item row, -1 without one."""
        nodes = self.leaf_nodes(rows)
        return torch.where(nodes >= 0, self.leaves(nodes.clamp(min=0)).first, -1)

    def children(self, nodes: Tensor, width: int | None = None) -> Children:
        """Returns all children of each node, those of the base first.

        Args:
            nodes: [n].
            width: Pads to this many children without a host sync. None pads to the widest of the
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
        """Returns the level of each node, 0 for the empty prefix."""
        size = self.base.num_nodes
        starts = on_device(self.level_starts, self.device)
        own = torch.bucketize(nodes - size, starts, right=True)
        return torch.where(nodes < size, self.base.levels(nodes.clamp(max=size - 1)), own)

    def nodes_of_items(self, rows: Tensor) -> Tensor:
        """Returns the node [n, L] of each prefix of each item's semantic id. rows: [n]."""
        leaves = self.leaf_nodes(rows)
        ranks = (leaves - self.base.any_leaf).clamp(0, self.base.num_items - 1)
        nodes = self.base.nodes_of_leaves(ranks)
        if not self.paths.shape[0]:
            return nodes
        own = self.paths[(leaves - self._own_leaves).clamp(min=0)]
        return torch.where((leaves >= self.base.num_nodes)[:, None], own, nodes)

    def items_of_leaves(self, nodes: Tensor) -> Tensor:
        """Returns the item row of each leaf node (a node of level L)."""
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
        """Returns each node's first child in the base and their number, 0 for overlay nodes."""
        size = self.base.num_nodes
        first = self.base.first_child[nodes.clamp(max=size)].long()
        return first, self.base.first_child[(nodes + 1).clamp(max=size)] - first

    def _find(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the position of each node in `grown`, and whether it is there."""
        place = torch.searchsorted(self.grown.nodes, nodes.contiguous())
        place = place.clamp(max=self.grown.nodes.shape[0] - 1)
        return place, self.grown.nodes[place] == nodes

    def _either(self, nodes: Tensor, base: Tensor, own: Tensor) -> Tensor:
        """Returns a column of the nodes, read from the base or from the overlay."""
        size = base.shape[0]
        values = base[nodes.clamp(max=size - 1)].long()
        if not own.shape[0]:
            return values
        return torch.where(nodes < size, values, own[(nodes - size).clamp(min=0)])
