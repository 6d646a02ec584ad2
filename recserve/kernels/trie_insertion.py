"""How semantic ids join a trie: walk down the base, then number what it lacks, level by level."""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.trie import Trie, lexicographic_order
from recserve.kernels.trie_overlay import Descent, Grown, TrieOverlay


def overlay_trie(
    base: Trie,
    codes: Tensor,
    rows: Tensor,
    num_rows: int,
    gone: Tensor | None = None,
    earlier: TrieOverlay | None = None,
) -> TrieOverlay:
    """The base with further semantic ids.

    codes [n, L]: distinct semantic ids; where the base has one already, its item is replaced.
    rows [n]: item row of each, ascending, base.num_rows .. num_rows - 1. gone [g]: rows of base or
    overlay that must not be returned. earlier: overlay of an earlier version, which spares the ids
    it has the way down the base. Everything on the base's device.
    """
    codes, rows = codes.to(base.device, torch.int64), rows.to(base.device, torch.int64)
    descent = _descent(base, codes, rows, earlier)
    order = lexicographic_order(codes, base.codebook_sizes)
    codes, ordered = codes[order], descent.at(order)
    there = ordered.depths == base.num_levels
    old, found = ordered.at(there), ordered.at(~there)
    leaves = old.nodes[:, -1]
    levels = _Levels(base, codes[~there], found)
    row_leaves = torch.full((num_rows - base.num_rows,), -1, device=base.device)
    row_leaves[old.rows - base.num_rows] = leaves
    row_leaves[found.rows - base.num_rows] = levels.paths[:, -1]
    return TrieOverlay(
        base,
        levels.grown(),
        *levels.own_nodes(),
        levels.starts,
        found.before,
        found.rows,
        levels.paths[:, 1:],
        leaves - base.any_leaf,
        old.rows,
        row_leaves,
        None if gone is None or not gone.numel() else gone.to(base.device, torch.int64),
        descent,
    )


def _descent(base: Trie, codes: Tensor, rows: Tensor, earlier: TrieOverlay | None) -> Descent:
    """Of each id, in the given order; looked up where an earlier overlay has it."""
    if earlier is None or earlier.base is not base or not earlier.descent.rows.shape[0]:
        return _descend(base, codes, rows)
    known = earlier.descent
    at = torch.searchsorted(known.rows, rows).clamp(max=known.rows.shape[0] - 1)
    lacking = known.rows[at] != rows
    found, fresh = known.at(at), _descend(base, codes[lacking], rows[lacking])
    for name in ("rows", "nodes", "depths", "before"):
        getattr(found, name)[lacking] = getattr(fresh, name)
    return found


def _descend(base: Trie, codes: Tensor, rows: Tensor) -> Descent:
    """Walk down the base, a binary search among the children of each level. codes [m, L]."""
    m, levels = codes.shape
    node = torch.zeros(m, dtype=torch.int64, device=codes.device)
    inside = torch.ones(m, dtype=torch.bool, device=codes.device)
    depths, before = torch.zeros_like(node), torch.zeros_like(node)
    nodes = [node]
    for level in range(levels):
        low, stop = base.first_child[node].long(), base.first_child[node + 1].long()
        high = stop
        for _ in range(base.codebook_sizes[level].bit_length()):
            middle = (low + high) // 2
            here = base.node_codes[middle.clamp(max=base.num_nodes - 1)]
            ahead = (low < high) & (here < codes[:, level])
            high = torch.where(ahead | (low >= high), high, middle)
            low = torch.where(ahead, middle + 1, low)
        child = low.clamp(max=base.num_nodes - 1)
        found = inside & (low < stop) & (base.node_codes[child] == codes[:, level])
        ends = inside & ~found
        where = torch.where(low < stop, base.first_leaf[child], base.last_leaf[node])
        before = torch.where(ends, where.long(), before)
        depths = torch.where(found, level + 1, depths)
        node = torch.where(found, child, node)
        inside = found
        nodes.append(torch.where(found, child, -1))
    return Descent(rows, torch.stack(nodes, dim=1), depths, before)


class _Levels:
    """The nodes of m inserted ids, ascending, level by level.

    starts: as TrieOverlay.level_starts. paths [m, L + 1]: node of each prefix, the empty one first.
    opens [m, L + 1]: whether the id is the first with its prefix. new [m, L + 1]: and the base
    lacks the prefix. opened [m, L + 1]: how many such there are up to here.
    """

    def __init__(self, base: Trie, codes: Tensor, descent: Descent) -> None:
        self.base, self.codes, self.descent = base, codes, descent
        m, levels = codes.shape
        device = codes.device
        changed = torch.ones(m, levels + 1, dtype=torch.bool, device=device)
        changed[1:, 0] = False
        changed[1:, 1:] = (codes[1:] != codes[:-1]).int().cumsum(1) > 0
        self.opens = changed
        lacking = torch.arange(levels + 1, device=device) > descent.depths[:, None]
        self.new = changed & lacking
        # By column: a sum along rows that are far apart is several times slower.
        self.opened = self.new.T.contiguous().cumsum(1).T
        sizes = self.opened[-1, 1:] if m else torch.zeros(levels, dtype=torch.int64)
        self.starts = (0, *sizes.cumsum(0).tolist())  # sizes of the arrays to come
        first = torch.tensor((0, *self.starts[:-1]), device=device) + base.num_nodes
        own = first + self.opened - 1
        self.paths = torch.where(lacking, own, descent.nodes)

    def own_nodes(self) -> tuple[Tensor, Tensor]:
        """Codes and parents of the overlay's nodes, in the order of their numbers."""
        level, index = self.new.T.nonzero(as_tuple=True)
        return self.codes[index, level - 1], self.paths[index, level - 1]

    def grown(self) -> Grown:
        """Every prefix of an inserted id, once, with its leaf ranks and its children."""
        m, levels = self.codes.shape
        level, index = self.opens.T.nonzero(as_tuple=True)
        if not m:
            empty = torch.full((1,), -1, device=self.codes.device)
            return Grown(empty, empty, empty, empty, torch.zeros_like(empty))
        # Ids with the same prefix are neighbours: each opens where the one before it ended.
        same = torch.cat([level[1:] == level[:-1], level.new_zeros(1, dtype=torch.bool)])
        stop = torch.where(same, torch.roll(index, -1), m)
        nodes = self.paths[index, level]
        known = nodes < self.base.num_nodes
        there = torch.where(known, nodes, 0)
        first = torch.where(known, self.base.first_leaf[there], self.descent.before[index])
        last = torch.where(known, self.base.last_leaf[there], self.descent.before[index])
        opened = torch.zeros(m + 1, levels + 2, dtype=torch.int64, device=self.codes.device)
        opened[1:, :-1] = self.opened
        starts = torch.tensor((0, *self.starts), device=self.codes.device) + self.base.num_nodes
        child_first = starts[(level + 1).clamp(max=levels)] + opened[index, level + 1]
        child_count = opened[stop, level + 1] - opened[index, level + 1]
        order = torch.sort(nodes).indices
        columns = (nodes, first + index, last + stop, child_first, child_count)
        return Grown(*(column[order] for column in columns))
