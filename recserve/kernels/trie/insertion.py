"""Inserts semantic ids into a trie: a descent among its edges, then new nodes level by level."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recserve.kernels.trie.trie import (
    BasePaths,
    ChangedNodes,
    Insertions,
    Trie,
    lexicographic_order,
)


def insert_items(
    base: Trie,
    codes: Tensor,
    rows: Tensor,
    num_rows: int,
    removed_rows: Tensor | None = None,
    earlier: Trie | None = None,
    superseded: Tensor | None = None,
) -> Trie:
    """Returns the base with further semantic ids. All tensors are on the base's device.

    Args:
        base: The trie that was built.
        codes: [n, L] distinct semantic ids. If the base has one already, its item is replaced.
        rows: [n] item row of each, ascending, base.num_rows .. num_rows - 1.
        num_rows: Item rows of the new version.
        removed_rows: [g] rows that must not be returned, also inserted ones.
        earlier: Trie of an earlier version. Its ids need no new descent in the base.
        superseded: Those of the removed rows on which no score may depend.
    """
    codes, rows = codes.to(base.device, torch.int64), rows.to(base.device, torch.int64)
    descent = _descent(base, codes, rows, None if earlier is None else earlier.insertions)
    order = lexicographic_order(codes, base.codebook_sizes)
    depths = descent.depths.index_select(0, order)
    inserted = order[depths < base.num_levels]
    old, found = descent.at(order[depths == base.num_levels]), descent.at(inserted)
    leaves = old.nodes[-1]
    levels = _Levels(base, codes.index_select(0, inserted), found)
    row_leaves = torch.full((num_rows - base.num_rows,), -1, device=base.device)
    row_leaves[old.rows - base.num_rows] = leaves
    row_leaves[found.rows - base.num_rows] = levels.paths[-1]
    if removed_rows is not None:
        removed_rows = removed_rows.to(base.device, torch.int64) if removed_rows.numel() else None
    if superseded is not None:
        superseded = superseded.to(base.device, torch.int64) if superseded.numel() else None
    insertions = Insertions(
        base,
        levels.changed_nodes(),
        *levels.own_nodes(),
        levels.starts,
        found.first[-1],
        found.rows,
        levels.paths[1:].T,
        leaves - base.any_leaf,
        old.rows,
        row_leaves,
        removed_rows,
        descent,
        superseded,
    )
    return replace(base, insertions=insertions)


def _descent(base: Trie, codes: Tensor, rows: Tensor, earlier: Insertions | None) -> BasePaths:
    """Returns the prefixes of each id, in order, from an earlier version if it has them."""
    if earlier is None or earlier.base is not base or not earlier.descent.rows.shape[0]:
        return _descend(base, codes, rows)
    known = earlier.descent
    at = torch.searchsorted(known.rows, rows).clamp(max=known.rows.shape[0] - 1)
    lacking = known.rows[at] != rows
    found, fresh = known.at(at), _descend(base, codes[lacking], rows[lacking])
    for name in ("rows", "nodes", "first", "last", "depths"):
        getattr(found, name)[..., lacking] = getattr(fresh, name)
    return found


def _descend(base: Trie, codes: Tensor, rows: Tensor) -> BasePaths:
    """Descends the base with one binary search among its edges per level. codes: [m, L]."""
    m, levels = codes.shape
    node = torch.zeros(m, dtype=torch.int64, device=codes.device)
    inside = torch.ones(m, dtype=torch.bool, device=codes.device)
    depths, before = torch.zeros_like(node), torch.zeros_like(node)
    nodes = [node]
    for level in range(levels):
        edge = (node * max(base.codebook_sizes) + codes[:, level]).to(base.edges.dtype)
        place = torch.searchsorted(base.edges, edge)
        child = place.clamp(max=base.num_nodes - 1)
        found = inside & (base.edges[child] == edge)
        among = place < base.first_child[node + 1]
        where = torch.where(among, base.first_leaf[child], base.last_leaf[node])
        before = torch.where(inside & ~found, where.long(), before)
        depths += found
        node = torch.where(found, child, node)
        inside = found
        nodes.append(torch.where(found, child, -1))
    path = torch.stack(nodes)
    there, known = path.clamp(min=0), path >= 0
    first = torch.where(known, base.first_leaf[there].long(), before)
    last = torch.where(known, base.last_leaf[there].long(), before)
    return BasePaths(rows, path, first, last, depths)


class _Levels:
    """The nodes of m inserted ids in ascending order, level by level.

    Attributes:
        starts: As Insertions.level_starts.
        paths: [L + 1, m] node of each prefix, the empty one first.
        opens: [L + 1, m] whether the id is the first with its prefix.
        new: [L + 1, m] whether in addition the base lacks the prefix.
        opened: [L + 1, m] number of new prefixes up to and including this id.
    """

    def __init__(self, base: Trie, codes: Tensor, descent: BasePaths) -> None:
        self.base, self.codes, self.descent = base, codes.T.contiguous(), descent
        m, levels = codes.shape
        device = codes.device
        self.opens = torch.ones(levels + 1, m, dtype=torch.bool, device=device)
        self.opens[0, 1:] = False
        self.opens[1:, 1:] = (self.codes[:, 1:] != self.codes[:, :-1]).cumsum(0) > 0
        lacking = torch.arange(levels + 1, device=device)[:, None] > descent.depths
        self.new = self.opens & lacking
        self.opened = self.new.cumsum(1)
        sizes = self.opened[1:, -1] if m else torch.zeros(levels, dtype=torch.int64)
        self.starts = (0, *sizes.cumsum(0).tolist())  # the host needs the sizes of the arrays
        first = torch.tensor((0, *self.starts[:-1]), device=device) + base.num_nodes
        self.paths = torch.where(lacking, first[:, None] + self.opened - 1, descent.nodes)

    def own_nodes(self) -> tuple[Tensor, Tensor]:
        """Returns codes and parents of the inserted nodes, in the order of their numbers."""
        above = self.new[1:].flatten().nonzero().flatten()
        return self.codes.flatten().index_select(0, above), self.paths.flatten()[above]

    def changed_nodes(self) -> ChangedNodes:
        """Returns every prefix of an inserted id once, with its leaf ranks and its children."""
        levels, m = self.codes.shape
        device = self.codes.device
        if not m:
            empty = torch.full((1,), -1, device=device)
            return ChangedNodes(empty, empty, empty, empty, torch.zeros_like(empty))
        place = self.opens.flatten().nonzero().flatten()
        level = place // m
        index = place - level * m
        # Ids with the same prefix are adjacent: each group starts where the previous one ended.
        same = torch.cat([level[1:] == level[:-1], level.new_zeros(1, dtype=torch.bool)])
        stop = torch.where(same, torch.roll(index, -1), m)
        nodes = self.paths.flatten().index_select(0, place)
        known = nodes < self.base.num_nodes
        first = self.descent.first.flatten().index_select(0, place)
        last = self.descent.last.flatten().index_select(0, place)
        opened = torch.zeros(levels + 2, m + 1, dtype=torch.int64, device=device)
        opened[:-1, 1:] = self.opened
        below, opened = (level + 1) * (m + 1), opened.flatten()
        up_to = opened.index_select(0, below + index)
        starts = torch.tensor((0, *self.starts), device=device) + self.base.num_nodes
        child_first = starts.index_select(0, (level + 1).clamp(max=levels)) + up_to
        child_count = opened.index_select(0, below + stop) - up_to
        # Both parts are already ascending: by level, and lexicographically within a level.
        order = torch.cat([known.nonzero().flatten(), (~known).nonzero().flatten()])
        columns = (nodes, first + index, last + stop, child_first, child_count)
        return ChangedNodes(*(column.index_select(0, order) for column in columns))
