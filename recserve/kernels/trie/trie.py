"""The catalogue's trie on the device: every existing semantic id, as arrays.

Nodes are numbered breadth-first and, within a level, in lexicographic order of their prefixes. This
has two consequences. The children of a node are consecutive node numbers. The items under a node
are a consecutive range of leaf ranks. So the number of allowed items under a prefix is a difference
of two prefix sums, at any node and for any filter.

    0 -+- 1 -+- 3    ids (0, 2), (0, 5), (1, 4)     first_child  1 3 5 6 6 6 6
       |     +- 4    node_codes  0 0 1 2 5 4        first_leaf   0 0 2 0 1 2
       +- 2 --- 5    parents     0 0 0 1 1 2        last_leaf    3 2 3 1 2 3

Source for the layout's aim (cost independent of catalogue size): STATIC, arXiv 2602.22647.

Later semantic ids are inserted without a change of these arrays. Prefixes that the trie lacked are
numbered after its own nodes, breadth-first and lexicographically. So the children of a node are at
most two ranges of node numbers: the built and the inserted ones. Leaf ranks follow the merged
order. A built leaf moves up by the number of ids inserted before it, which is one binary search.
The few nodes with inserted ids below them are listed with their ranks. So the cost of a change does
not depend on the catalogue's size. Reading costs one binary search more than without insertions.

A filter over leaves has two parts. Bits over the built leaves are shared by all requests with the
same filter, in every version with the same base. Short lists hold the leaves where a version or a
request differs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.native.native import N, P


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
class ChangedNodes:
    """Nodes, also built ones, with inserted ids at or below them, ordered by node number.

    Attributes:
        nodes: [S] node numbers, ascending. The last K are the inserted nodes.
        first: [S]. Leaf ranks under the node are `first : last`.
        last: [S].
        child_first: [S] first inserted child of the node.
        child_count: [S] number of its inserted children.
    """

    nodes: Tensor
    first: Tensor
    last: Tensor
    child_first: Tensor
    child_count: Tensor

    def find(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the position of each node in the list, and whether it is there."""
        place = torch.searchsorted(self.nodes, nodes.contiguous())
        place = place.clamp(max=self.nodes.shape[0] - 1)
        return place, self.nodes[place] == nodes


@dataclass(frozen=True)
class BasePaths:
    """The prefixes of n semantic ids that the built trie already has.

    Attributes:
        rows: [n] item row of each id, ascending.
        nodes: [L + 1, n] node of each prefix, -1 for prefixes that the trie lacks.
        first: [L + 1, n]. Built leaves under the prefix are `first : last`. For a missing prefix
            both are the number of built leaves before the id.
        last: [L + 1, n].
        depths: [n] number of codes of the longest prefix in the trie.
    """

    rows: Tensor
    nodes: Tensor
    first: Tensor
    last: Tensor
    depths: Tensor

    def at(self, index: Tensor) -> BasePaths:
        """Returns the prefixes at the given indices [n] int64."""
        columns = (self.rows, self.nodes, self.first, self.last, self.depths)
        return BasePaths(*(column.index_select(-1, index) for column in columns))


@dataclass(frozen=True)
class Insertions:
    """m semantic ids that were inserted into a trie, and items that were removed from it.

    Attributes:
        base: The trie as it was built.
        changed: Nodes with inserted ids at or below them.
        codes: [K] last code of each inserted node.
        parents: [K] the node one code shorter.
        level_starts: [L + 1]. Inserted nodes of level l + 1 are `level_starts[l] :
            level_starts[l + 1]`, counted from 0.
        inserted: [m] built leaves before each inserted id.
        rows: [m] item row of each inserted id.
        paths: [m, L] node of each of its prefixes.
        replaced_leaves: [t] built leaf ranks, ascending, that now belong to another row.
        replacing_rows: [t] these rows.
        row_leaves: Leaf node of each row that the base does not have, -1 without one.
        removed_rows: Rows that must not be returned. None means that there are none.
        descent: Prefixes of all later ids, reused for the next version.
        superseded: Further removed rows on which no score may depend. None means that there are
            none.
    """

    base: Trie
    changed: ChangedNodes
    codes: Tensor
    parents: Tensor
    level_starts: tuple[int, ...]
    inserted: Tensor
    rows: Tensor
    paths: Tensor
    replaced_leaves: Tensor
    replacing_rows: Tensor
    row_leaves: Tensor
    removed_rows: Tensor | None
    descent: BasePaths
    superseded: Tensor | None = None

    @cached_property
    def ranks(self) -> Tensor:
        """[m] ascending leaf ranks of the inserted ids."""
        return self.inserted + torch.arange(self.inserted.shape[0], device=self.inserted.device)

    @cached_property
    def removed_on_host(self) -> Tensor | None:
        """The removed rows on the CPU."""
        return None if self.removed_rows is None else self.removed_rows.cpu()

    @property
    def changed_rows(self) -> Tensor:
        """Item rows whose semantic ids are newer than the base, or belonged to another row."""
        return torch.cat([self.rows, self.replacing_rows])


class TrieStruct(ctypes.Structure):
    """`Trie` of trie.h. `arrays` keeps the tensors at these addresses alive."""

    _fields_ = [
        *((name, P) for name in ("first_child", "codes", "first_leaf", "last_leaf")),
        *((name, N) for name in ("nodes", "all_nodes", "any_leaf")),
        *((name, P) for name in ("changed", "changed_first", "changed_last")),
        *((name, P) for name in ("later_first", "later_count")),
        ("num_changed", N),
        ("own_codes", P),
        ("inserted", P),
        ("num_inserted", N),
    ]
    arrays: list[Tensor]


@dataclass(frozen=True)
class Trie:
    """Prefix tree of all semantic ids of one catalogue version.

    The arrays are those of the trie as it was built. Code that also serves a changed catalogue
    calls the methods, which know the insertions. Methods take nodes or rows of any shape unless
    said otherwise; results have the same shape.

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
        insertions: Changes since the trie was built. None means that there are none.
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
    insertions: Insertions | None = None

    @property
    def base(self) -> Trie:
        """The trie as it was built: this one, if it has no insertions."""
        return self if self.insertions is None else self.insertions.base

    @property
    def device(self) -> torch.device:
        """Device of the arrays."""
        return self.first_child.device

    @property
    def num_levels(self) -> int:
        """L, including the disambiguation level."""
        return len(self.codebook_sizes)

    @property
    def num_built(self) -> int:
        """Number of nodes without the inserted ones, including the empty prefix."""
        return self.node_codes.shape[0]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, including the empty prefix."""
        later = 0 if self.insertions is None else self.insertions.codes.shape[0]
        return self.num_built + later

    @property
    def num_items(self) -> int:
        """I, the number of leaves, including those of removed items."""
        later = 0 if self.insertions is None else self.insertions.inserted.shape[0]
        return self.leaf_items.shape[0] + later

    @property
    def num_rows(self) -> int:
        """Item rows of the catalogue version; more than items where rows were replaced."""
        later = 0 if self.insertions is None else self.insertions.row_leaves.shape[0]
        return self.item_leaves.shape[0] + later

    @property
    def any_leaf(self) -> int:
        """Any node of level L."""
        return self.level_starts[self.num_levels]

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Number of nodes of each level, the empty prefix first."""
        sizes = tuple(stop - start for start, stop in pairwise(self.level_starts))
        if self.insertions is None:
            return sizes
        later = (stop - start for start, stop in pairwise(self.insertions.level_starts))
        return (1, *(n + more for n, more in zip(sizes[1:], later, strict=True)))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Most children of a node of each level 0 : L; upper bounds with insertions."""
        if self.insertions is None:
            counts, starts = self.first_child.diff(), self.level_starts
            parts = [counts[start:stop].max() for start, stop in pairwise(starts[:-1])]
            return tuple(torch.stack(parts).tolist())
        changed = self.insertions.changed
        more = int(changed.child_count.max()) if changed.nodes.shape[0] else 0
        sizes = zip(self.base.widths, self.codebook_sizes, strict=True)
        return tuple(min(n + more, c) for n, c in sizes)

    @cached_property
    def closing_level(self) -> int:
        """The level, at least 1, from which fewer and fewer nodes have several items.

        Reads the device once per built trie. Insertions hardly change it.
        """
        if self.insertions is not None:
            return self.base.closing_level
        starts, many = self.level_starts, self.last_leaf - self.first_leaf > 1
        counts = [int(many[a:b].sum()) for a, b in pairwise(starts[1:])]
        level = len(counts)
        while level > 1 and counts[level - 1] <= counts[level - 2]:
            level -= 1
        return level

    @cached_property
    def edges(self) -> Tensor:
        """[nodes] `parent * largest codebook + code` of built nodes, ascending; -1 at node 0."""
        edges = self.parents.long() * max(self.codebook_sizes) + self.node_codes
        edges[0] = -1
        fits = self.num_built * max(self.codebook_sizes) < 2**31
        return edges.to(torch.int32) if fits else edges

    @cached_property
    def leaf_rows(self) -> Tensor:
        """[I] item row at each leaf rank."""
        later = self.insertions
        if later is None:
            return self.leaf_items
        built = self.leaf_items.long()
        built[later.replaced_leaves] = later.replacing_rows
        merged = torch.empty(self.num_items, dtype=torch.int64, device=self.device)
        is_built = torch.ones(self.num_items, dtype=torch.bool, device=self.device)
        is_built[later.ranks] = False
        merged[is_built] = built
        merged[later.ranks] = later.rows
        return merged

    @property
    def removed_rows(self) -> Tensor | None:
        """Item rows that must not be returned. None means that there are none."""
        return None if self.insertions is None else self.insertions.removed_rows

    @cached_property
    def removed_nodes(self) -> Tensor:
        """Leaf nodes of the removed items that still have their semantic ids."""
        removed = self.removed_rows
        if removed is None:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return self.leaf_nodes(removed)[self._removed_with_ids]

    @cached_property
    def removed_leaves(self) -> Tensor | None:
        """Ascending leaf ranks of items that must not be returned. None if there are none."""
        if self.removed_rows is None:
            return None
        nodes = self.removed_nodes
        return torch.sort(self.leaves(nodes).first).values if nodes.shape[0] else None

    @cached_property
    def replaced_rows(self) -> Tensor | None:
        """Removed rows on which no score may depend: without a semantic id, or superseded."""
        if self.removed_rows is None or self.insertions is None:
            return None
        rows = self.removed_rows[~self._removed_with_ids]
        if (superseded := self.insertions.superseded) is not None:
            rows = torch.unique(torch.cat([rows, superseded]))
        return rows if rows.shape[0] else None

    @cached_property
    def _removed_with_ids(self) -> Tensor:
        """Whether each removed row still has its semantic id."""
        removed = self.removed_rows
        assert removed is not None
        nodes = self.leaf_nodes(removed)
        return (nodes >= 0) & (self.items_of_leaves(nodes.clamp(min=self.any_leaf)) == removed)

    @property
    def address(self) -> int:
        """Address of the struct that the C sources read; on a CPU.

        Raises:
            ValueError: If an array of the built nodes is not int32.
        """
        return ctypes.addressof(self._struct)

    @cached_property
    def _struct(self) -> TrieStruct:
        built = [self.first_child, self.node_codes, self.first_leaf, self.last_leaf]
        if any(column.dtype != torch.int32 for column in built):
            raise ValueError("the arrays of the built nodes must be int32 for the C sources")
        built = [column.contiguous() for column in built]
        struct = TrieStruct(
            *(column.data_ptr() for column in built), self.num_built, self.num_nodes, self.any_leaf
        )
        struct.arrays = built
        if (later := self.insertions) is not None:
            columns = [*vars(later.changed).values(), later.codes, later.inserted]
            wide = [column.long().contiguous() for column in columns]
            nodes, first, last, child_first, child_count, codes, inserted = wide
            struct.changed, struct.num_changed = nodes.data_ptr(), nodes.shape[0]
            struct.changed_first, struct.changed_last = first.data_ptr(), last.data_ptr()
            struct.later_first, struct.later_count = child_first.data_ptr(), child_count.data_ptr()
            struct.own_codes, struct.inserted = codes.data_ptr(), inserted.data_ptr()
            struct.num_inserted = inserted.shape[0]
            struct.arrays += wide
        return struct

    def padding(self, level: int) -> int | None:
        """Returns the width to which children of a level's nodes are padded.

        A CPU pads to the widest of the given nodes, so the result is None. Other devices pad to the
        widest node of the level, so that the host does not wait for the device.
        """
        return None if self.device.type == "cpu" else self.widths[level]

    def children(self, nodes: Tensor, width: int | None = None) -> Children:
        """Returns all children of each node, the built ones first.

        Args:
            nodes: [n].
            width: Pads to this many children without a host sync. None pads to the widest of the
                nodes.
        """
        first, count = self._built_children(nodes)
        total, later = count, None
        if self.insertions is not None:
            changed = self.insertions.changed
            place, is_changed = changed.find(nodes)
            total = count + torch.where(is_changed, changed.child_count[place], 0)
            later = changed.child_first[place] - count
        if width is None:
            width = int(total.max()) if total.numel() else 0
        step = torch.arange(width, device=self.device)
        valid = step < total[:, None]
        child = first[:, None] + step
        if later is not None:
            child = torch.where(step < count[:, None], child, later[:, None] + step)
        child = torch.where(valid, child, 0)
        return Children(child, self.codes_of(child), valid)

    def num_children(self, nodes: Tensor) -> Tensor:
        """Returns the number of children of each node."""
        _, count = self._built_children(nodes)
        if self.insertions is None:
            return count
        changed = self.insertions.changed
        place, is_changed = changed.find(nodes)
        return count + torch.where(is_changed, changed.child_count[place], 0)

    def child_columns(self, nodes: Tensor, parents: Tensor) -> Tensor:
        """Returns the column of each node in `children` of its parent."""
        if self.insertions is None:
            return nodes - self.first_child[parents]
        first, count = self._built_children(parents)
        changed = self.insertions.changed
        place, _ = changed.find(parents)
        later = nodes - changed.child_first[place] + count
        return torch.where(nodes < self.num_built, nodes - first, later)

    def codes_of(self, nodes: Tensor) -> Tensor:
        """Returns the last code of each node's prefix."""
        if self.insertions is None:
            return self.node_codes[nodes]
        return self._either(nodes, self.node_codes, self.insertions.codes)

    def parents_of(self, nodes: Tensor) -> Tensor:
        """Returns the node one code shorter."""
        if self.insertions is None:
            return self.parents[nodes]
        return self._either(nodes, self.parents, self.insertions.parents)

    def levels(self, nodes: Tensor) -> Tensor:
        """Returns the level of each node, 0 for the empty prefix."""
        starts = on_device(self.level_starts[1:], self.device)
        if self.insertions is None:
            return torch.bucketize(nodes, starts, right=True)
        size = self.num_built
        later = on_device(self.insertions.level_starts, self.device)
        own = torch.bucketize(nodes - size, later, right=True)
        built = torch.bucketize(nodes.clamp(max=size - 1), starts, right=True)
        return torch.where(nodes < size, built, own)

    def leaves(self, nodes: Tensor) -> Leaves:
        """Returns the leaf ranks under each node."""
        if self.insertions is None:
            return Leaves(self.first_leaf[nodes], self.last_leaf[nodes])
        known, changed = nodes.clamp(max=self.num_built - 1), self.insertions.changed
        first, last = self.first_leaf[known].long(), self.last_leaf[known].long()
        moved = torch.searchsorted(self.insertions.inserted, first, right=True)
        place, is_changed = changed.find(nodes)
        return Leaves(
            torch.where(is_changed, changed.first[place], first + moved),
            torch.where(is_changed, changed.last[place], last + moved),
        )

    def built_leaves(self, nodes: Tensor) -> Leaves:
        """Returns the ranks that the leaves under each node had in the base; inserted nodes have
        none.
        """
        if self.insertions is None:
            return self.leaves(nodes)
        size = self.num_built
        known = nodes.clamp(max=size - 1)
        first, last = self.first_leaf[known], self.last_leaf[known]
        return Leaves(first, torch.where(nodes < size, last, first))

    def leaf_nodes(self, rows: Tensor) -> Tensor:
        """Returns the leaf node of each item row, -1 without one."""
        later, known = self.insertions, self.item_leaves.shape[0]
        ranks = self.item_leaves[rows if later is None else rows.clamp(max=known - 1)].long()
        leaf = torch.where(ranks >= 0, ranks + self.any_leaf, -1)
        if later is None or not later.row_leaves.shape[0]:
            return leaf
        return torch.where(rows < known, leaf, later.row_leaves[(rows - known).clamp(min=0)])

    def leaf_ranks(self, rows: Tensor) -> Tensor:
        """Returns the leaf rank of each item row, -1 without one."""
        if self.insertions is None:
            return self.item_leaves[rows]
        nodes = self.leaf_nodes(rows)
        return torch.where(nodes >= 0, self.leaves(nodes.clamp(min=0)).first, -1)

    def nodes_of_items(self, rows: Tensor) -> Tensor:
        """Returns the node [n, L] of each prefix of each item's semantic id. rows: [n]."""
        later = self.insertions
        if later is None:
            return self._nodes_of_leaves(self.item_leaves[rows])
        leaves = self.leaf_nodes(rows)
        ranks = (leaves - self.any_leaf).clamp(0, self.leaf_items.shape[0] - 1)
        nodes = self._nodes_of_leaves(ranks)
        if not later.paths.shape[0]:
            return nodes
        own = later.paths[(leaves - self._first_inserted_leaf).clamp(min=0)]
        return torch.where((leaves >= self.num_built)[:, None], own, nodes)

    def items_of_leaves(self, nodes: Tensor) -> Tensor:
        """Returns the item row of each leaf node (a node of level L)."""
        later = self.insertions
        if later is None:
            return self.leaf_items[nodes - self.any_leaf]
        ranks = (nodes - self.any_leaf).clamp(0, self.leaf_items.shape[0] - 1)
        rows = self.leaf_items[ranks].long()
        if later.replaced_leaves.shape[0]:
            place = torch.searchsorted(later.replaced_leaves, ranks)
            place = place.clamp(max=later.replaced_leaves.shape[0] - 1)
            is_replaced = later.replaced_leaves[place] == ranks
            rows = torch.where(is_replaced, later.replacing_rows[place], rows)
        if not later.rows.shape[0]:
            return rows
        own = later.rows[(nodes - self._first_inserted_leaf).clamp(min=0)]
        return torch.where(nodes < self.num_built, rows, own)

    def to(self, device: torch.device | str) -> Trie:
        """Returns the same trie on another device.

        Raises:
            ValueError: If the trie has insertions.
        """
        if self.insertions is not None:
            raise ValueError("a trie with insertions stays on its device; move its base instead")
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, column in columns.items():
            columns[name] = column.to(device) if isinstance(column, Tensor) else column
        return Trie(**columns)

    def _built_children(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first built child of each node and their number, 0 at inserted nodes."""
        if self.insertions is None:
            first = self.first_child[nodes]
            return first, self.first_child[nodes + 1] - first
        size = self.num_built
        first = self.first_child[nodes.clamp(max=size)].long()
        return first, self.first_child[(nodes + 1).clamp(max=size)] - first

    def _nodes_of_leaves(self, leaves: Tensor) -> Tensor:
        """Returns the node [n, L] of each prefix of the id at each built leaf. leaves: [n]."""
        columns = []
        for level in range(1, self.num_levels + 1):
            start, stop = self.level_starts[level], self.level_starts[level + 1]
            rank = torch.searchsorted(self.first_leaf[start:stop], leaves, right=True) - 1
            columns.append(rank + start)
        return torch.stack(columns, dim=-1)

    @property
    def _first_inserted_leaf(self) -> int:
        """Node number of the first inserted id."""
        assert self.insertions is not None
        return self.num_built + self.insertions.level_starts[self.num_levels - 1]

    def _either(self, nodes: Tensor, built: Tensor, inserted: Tensor) -> Tensor:
        """Returns a column of the nodes, read from the built or from the inserted nodes."""
        size = built.shape[0]
        values = built[nodes.clamp(max=size - 1)].long()
        if not inserted.shape[0]:
            return values
        return torch.where(nodes < size, values, inserted[(nodes - size).clamp(min=0)])


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


def catalog_trie(codes: Tensor, codebook_sizes: tuple[int, ...], without: np.ndarray) -> Trie:
    """Builds the trie of the rows of `codes` [I, L] but for the rows `without` [n]."""
    if not without.size:
        return build_trie(codes, codebook_sizes)
    present = torch.ones(len(codes), dtype=torch.bool)
    present[torch.from_numpy(without)] = False
    rows = present.nonzero().flatten()
    return build_trie(codes[rows], codebook_sizes, rows, len(codes))


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


@dataclass(frozen=True)
class LeafBits:
    """Allowed leaves of B requests as bits, with a count before every word.

    Two reads give the number of allowed leaves before any rank. 32 items take 8 bytes.

    Attributes:
        words: [B, I // 32 + 1] int32 bits.
        counts: [B, I // 32 + 1] int32 set bits before each word.
    """

    words: Tensor
    counts: Tensor

    def before(self, ranks: Tensor) -> Tensor:
        """Returns the allowed leaves before each rank, int32. ranks: [B, n] in 0 : I + 1."""
        place = (ranks >> 5).long()
        words = self.words.gather(1, place) & ((1 << (ranks & 31).int()) - 1)
        return self.counts.gather(1, place) + popcount(words)

    def within(self, leaves: Leaves) -> Tensor:
        """Returns the allowed leaves [B, n] int32 in each range. leaves: [B, n]."""
        return self.before(leaves.last) - self.before(leaves.first)


@dataclass(frozen=True)
class LeafFilter:
    """The leaves that a request allows.

    Without `bits` and `added`, all leaves are allowed. Otherwise the leaves of either are. The
    excluded leaves are removed in both cases.

    Attributes:
        excluded: Lists of ascending ranks int64 of leaves to remove. No leaf is in two lists. A row
            without a leaf has the number of items as its rank.
        bits: Allowed leaves of the base, one row.
        added: Ascending ranks int64 of leaves that are allowed in addition to `bits`.
    """

    excluded: tuple[Tensor, ...] = ()
    bits: LeafBits | None = None
    added: Tensor | None = None

    @property
    def all(self) -> bool:
        """Whether all leaves except the excluded ones are allowed."""
        return self.bits is None and self.added is None


@dataclass(frozen=True)
class BatchFilter:
    """The leaves that B requests allow: all of them, all but `excluded`, or `bits` and `added`.

    Attributes:
        excluded: [B, X] int, ascending leaf ranks that are not allowed, padded with the number of
            items or more.
        bits: Allowed leaves of the base.
        added: [B, A] ascending ranks of leaves that are allowed in addition to `bits`, padded like
            `excluded`. None means that there are none.

    Raises:
        ValueError: If `excluded` and `bits` are both given.
    """

    excluded: Tensor | None = None
    bits: LeafBits | None = None
    added: Tensor | None = None

    def __post_init__(self) -> None:
        if self.excluded is not None and self.bits is not None:
            raise ValueError("excluded and bits were both given; clear the excluded leaves' bits")

    def remaining(self, trie: Trie, nodes: Tensor) -> Tensor | None:
        """Returns a number that is positive where a node [B, n] has an allowed leaf.

        None means that every node has one.
        """
        if self.excluded is not None:
            leaves = trie.leaves(nodes)
            return (leaves.last - leaves.first) - count_in_ranges(self.excluded, leaves)
        if self.bits is None:
            return None
        left = self.bits.within(trie.built_leaves(nodes))
        return (
            left if self.added is None else left + count_in_ranges(self.added, trie.leaves(nodes))
        )


def pack_leaves(allowed: Tensor) -> LeafBits:
    """Packs allowed leaves [B, I] bool, by leaf rank."""
    requests, items = allowed.shape
    padded = torch.zeros(requests, (items // 32 + 1) * 32, dtype=torch.bool, device=allowed.device)
    padded[:, :items] = allowed
    if allowed.device.type == "cpu":
        packed = np.packbits(padded.numpy(), axis=1, bitorder="little")
        return count_leaves(torch.from_numpy(packed.view("<i4")))
    bits = padded.view(requests, -1, 32).int()
    return count_leaves((bits << torch.arange(32, device=allowed.device)).sum(-1).int())


def count_leaves(words: Tensor) -> LeafBits:
    """Adds the counts to words [B, n] int32."""
    counts = popcount(words)
    return LeafBits(words, counts.cumsum(-1, dtype=torch.int32) - counts)


def count_in_ranges(ranks: Tensor, leaves: Leaves) -> Tensor:
    """Returns how many of the ascending ranks lie in each range.

    Args:
        ranks: [n], or [B, n].
        leaves: Ranges; as many rows as the ranks.
    """
    last = torch.searchsorted(ranks, leaves.last.contiguous())
    return last - torch.searchsorted(ranks, leaves.first.contiguous())


def popcount(words: Tensor) -> Tensor:
    """Returns the set bits of each int32."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return (((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
