"""Diversity: at most so many items of each group, taken greedily from the best down.

Greedy in rounds instead of one item after the other: an item is in for certain where even all
undecided items before it would leave it a place in each of its groups, and out for certain where
the items that are in already fill one. The first undecided item is always one of the two.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cap:
    """At most `limit` items of each group.

    offsets [I + 1], groups [m]: item row i is of the groups `groups[offsets[i] : offsets[i + 1]]`;
    an item of no group is not limited.
    """

    offsets: np.ndarray
    groups: np.ndarray
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


def _memberships(rows: np.ndarray, caps: Seq[Cap]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place, group and limit of each pair of item and group, [m] each, by group, then place."""
    places, groups, limits, first = [], [], [], 0
    for cap in caps:
        counts = cap.offsets[rows + 1] - cap.offsets[rows]
        place = np.repeat(np.arange(rows.size), counts)
        inner = np.arange(place.size) - np.repeat(np.cumsum(counts) - counts, counts)
        group = cap.groups[cap.offsets[rows][place] + inner].astype(np.int64)
        places.append(place)
        groups.append(group + first)
        limits.append(np.full(place.size, cap.limit))
        first += int(cap.groups.max(initial=-1)) + 1
    place, group, limit = map(np.concatenate, (places, groups, limits))
    order = np.lexsort((place, group))
    same = (np.diff(group[order]) == 0) & (np.diff(place[order]) == 0)
    order = order[np.concatenate([[True], ~same])[: order.size]]  # an item counts once in a group
    return place[order], group[order], limit[order]


def _before(marked: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[m] marked pairs before each one in its group."""
    running = np.cumsum(marked) - marked
    counts: np.ndarray = running - np.repeat(running[starts], sizes)
    return counts
