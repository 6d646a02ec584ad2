"""Diversity: at most so many items of each group, taken greedily from the best down.

What a search finds may hold too few items that keep to the caps. An item of a full group never gets
a place any more, so the search goes on among the others (`still_open`), until k are chosen or there
is none left.

Greedy in rounds instead of one item after the other: an item is in for certain where even all
undecided items before it would leave it a place in each of its groups, and out for certain where
the items that are in already fill one. The first undecided item is always one of the two.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from recserve.core.allowed import AllowedItems
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie_view import TrieView


class Groups(Protocol):
    """Groups of items, by number; nothing is worked out but for the items that are asked about."""

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Place in `rows` and group, [m] each, of every pair of item and group, once, in any order.

        rows: [n] item rows. An item of no group is not limited.
        """
        ...

    def items(self, groups: np.ndarray) -> np.ndarray:
        """Rows of all items of any of the groups [g], in any order, repeats allowed."""
        ...


@dataclass(frozen=True)
class Cap:
    """At most `limit` items of each group."""

    groups: Groups
    limit: int


def first_k(rows: np.ndarray, caps: Seq[Cap], k: int) -> np.ndarray:
    """Places [<= k] in `rows`, ascending, of the items that a greedy choice under all caps takes.

    rows: [n] distinct item rows, best first.
    """
    if not caps:
        return np.arange(min(k, rows.size))
    places, groups, limits = _memberships(rows, caps)
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])[: groups.size])
    sizes = np.diff(np.append(starts, groups.size))
    inside = np.zeros(rows.size, dtype=bool)
    undecided = np.ones(rows.size, dtype=bool)
    while undecided.any():
        taken = _before(inside[places], starts, sizes)
        possible = _before((inside | undecided)[places], starts, sizes)
        full, tight = np.zeros((2, rows.size), dtype=bool)
        full[places[taken >= limits]] = True
        tight[places[possible >= limits]] = True
        inside |= undecided & ~tight
        undecided &= tight & ~full
    return np.flatnonzero(inside)[:k]


def still_open(
    rows: np.ndarray, caps: Seq[Cap], allowed: AllowedItems | None, num_rows: int
) -> np.ndarray:
    """[num_rows] bool: the allowed items that may stand beside the chosen ones, one of them at
    least.

    rows: [n] item rows that keep to the caps. allowed: None: all.
    """
    left = np.ones(num_rows, dtype=bool) if allowed is None else allowed.mask()
    left[rows] = False
    for cap in caps:
        groups, counts = np.unique(cap.groups.of(rows)[1], return_counts=True)
        left[cap.groups.items(groups[counts >= cap.limit])] = False
    return left


def _memberships(rows: np.ndarray, caps: Seq[Cap]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place, group and limit of each pair of item and group, [m] each, by group, then place."""
    places, groups, limits, first = [], [], [], 0
    for cap in caps:
        place, group = cap.groups.of(rows)
        places.append(place)
        groups.append(group + first)
        limits.append(np.full(place.size, cap.limit))
        first += int(group.max(initial=-1)) + 1
    place, group, limit = map(np.concatenate, (places, groups, limits))
    order = np.lexsort((place, group))
    return place[order], group[order], limit[order]


def _before(marked: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[m] marked pairs before each one in its group."""
    running = np.cumsum(marked) - marked
    counts: np.ndarray = running - np.repeat(running[starts], sizes)
    return counts


@dataclass(frozen=True)
class PrefixGroups:
    """Groups as in core/diversity.py; items are alike whose codes are the same up to `level`."""

    trie: TrieView
    level: int

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One group each."""
        asked = on_device(rows, self.trie.device, torch.int64)
        nodes = self.trie.nodes_of_items(asked)[:, self.level]
        return np.arange(rows.size), nodes.cpu().numpy().astype(np.int64)

    def items(self, groups: np.ndarray) -> np.ndarray:
        """Those of the leaves below each node."""
        below = self.trie.leaves(on_device(groups, self.trie.device, torch.int64))
        edges = zip(below.first.tolist(), below.last.tolist(), strict=True)
        rows = self.trie.leaf_rows
        found = [rows[first:last] for first, last in edges]
        return torch.cat([rows[:0], *found]).cpu().numpy()
