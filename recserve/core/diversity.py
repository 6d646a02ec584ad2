"""Diversity caps and quotas: a greedy choice of the best items, with a limit per group.

A search may find fewer than k items that satisfy the caps. Items of a full group can never be
chosen any more. The search is therefore repeated among the remaining items (`still_open`) until k
items are chosen or no item remains.

`first_k` decides many items per round instead of one item at a time:

- An item is chosen if each of its groups has a place even when all undecided better items are
  chosen.
- An item is dropped if the chosen better items already fill one of its groups.

The first undecided item always falls under one of the two rules, so every round makes progress.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from recserve.core.allowed import AllowedItems
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie import Trie


class Groups(Protocol):
    """Numbered groups of items, whose members are computed only on request."""

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns every (item, group) pair once, in any order.

        Args:
            rows: [n] item rows. An item without a group is not limited.

        Returns:
            Index into `rows` [m] and group number [m] of each pair.
        """
        ...

    def items(self, groups: np.ndarray) -> np.ndarray:
        """Returns the rows of all items of the groups [g], in any order. Rows may repeat."""
        ...


@dataclass(frozen=True)
class Cap:
    """A limit on the items of each group.

    Attributes:
        groups: The groups.
        limit: Most items of one group.
    """

    groups: Groups
    limit: int


def first_k(rows: np.ndarray, caps: Seq[Cap], k: int) -> np.ndarray:
    """Chooses items greedily under all caps.

    Args:
        rows: [n] distinct item rows, best first.
        caps: The caps. None of them is relaxed.
        k: Most items to choose.

    Returns:
        [<= k] ascending indices into `rows` of the chosen items.
    """
    if not caps:
        return np.arange(min(k, rows.size))
    places, groups, limits = _memberships(rows, caps)
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])[: groups.size])
    sizes = np.diff(np.append(starts, groups.size))
    inside = np.zeros(rows.size, dtype=bool)
    undecided = np.ones(rows.size, dtype=bool)
    while undecided.any():
        # `taken` counts chosen better items of a group; `possible` adds the undecided ones.
        taken = _before(inside[places], starts, sizes)
        possible = _before((inside | undecided)[places], starts, sizes)
        # full: no place is left. tight: undecided better items could still take the last place.
        full, tight = np.zeros((2, rows.size), dtype=bool)
        full[places[taken >= limits]] = True
        tight[places[possible >= limits]] = True
        inside |= undecided & ~tight
        undecided &= tight & ~full
    return np.flatnonzero(inside)[:k]


@dataclass(frozen=True)
class Minimum:
    """A least number of items of one kind in a slate.

    Attributes:
        count: The least number.
        items: The items of this kind.
    """

    count: int
    items: AllowedItems

    def is_met(self, rows: np.ndarray) -> bool:
        """Whether a slate [n] has enough items of this kind."""
        return int(self.items.at(rows).sum()) >= self.count


def meet_minimums(
    rows: np.ndarray, more: Seq[np.ndarray], minimums: Seq[Minimum], caps: Seq[Cap], k: int
) -> np.ndarray:
    """Puts items that a slate needs in the places of its last ones that it does not.

    The minimums take their items one after the other: each first those of the slate, best first,
    then those of its own list. An item counts for every minimum whose kind it is.

    Args:
        rows: [n] item rows of the slate, best first, which satisfy the caps.
        more: For each minimum, item rows of its kind, best first. Rows may be in the slate or in
            several lists.
        minimums: The minimums, whose counts add up to at most k.
        caps: The caps. None of them is relaxed.
        k: Most items of the slate.

    Returns:
        [<= k] item rows: those that stay, in their order, then the new ones.
    """
    if all(minimum.is_met(rows) for minimum in minimums):
        return rows
    needed = rows[:0]
    for minimum, found in zip(minimums, more, strict=True):
        lacking = minimum.count - int(minimum.items.at(needed).sum())
        own = np.concatenate([rows[minimum.items.at(rows)], found])
        own = own[np.sort(np.unique(own, return_index=True)[1])]
        order = np.concatenate([needed, own[~np.isin(own, needed)]])
        needed = order[first_k(order, caps, needed.size + max(lacking, 0))]
    order = np.concatenate([needed, rows[~np.isin(rows, needed)]])
    chosen = order[first_k(order, caps, k)]
    return np.concatenate([rows[np.isin(rows, chosen)], chosen[~np.isin(chosen, rows)]])


def still_open(
    rows: np.ndarray, caps: Seq[Cap], allowed: AllowedItems | None, num_rows: int
) -> np.ndarray:
    """Returns [num_rows] bool: allowed items that the caps still admit after the chosen ones.

    Args:
        rows: [n] chosen item rows, which satisfy the caps.
        caps: The caps.
        allowed: Items that the request allows. None allows all.
        num_rows: Item rows of the catalogue version.
    """
    left = np.ones(num_rows, dtype=bool) if allowed is None else allowed.mask()
    left[rows] = False
    for cap in caps:
        groups, counts = np.unique(cap.groups.of(rows)[1], return_counts=True)
        left[cap.groups.items(groups[counts >= cap.limit])] = False
    return left


def _memberships(rows: np.ndarray, caps: Seq[Cap]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns item index, group and limit [m] of each (item, group) pair.

    Pairs are sorted by group, then by index.

    Groups of different caps get different numbers.
    """
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
    """Returns [m] the number of marked pairs before each pair within its group."""
    running = np.cumsum(marked) - marked
    counts: np.ndarray = running - np.repeat(running[starts], sizes)
    return counts


@dataclass(frozen=True)
class PrefixGroups:
    """Groups of items whose semantic ids share their first codes.

    A group's number is its trie node.

    Attributes:
        trie: Trie of the catalogue version.
        level: Codes up to and including this level, from 0, must be equal.
    """

    trie: Trie
    level: int

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns one group per row."""
        on_trie = on_device(rows, self.trie.device, torch.int64)
        nodes = self.trie.nodes_of_items(on_trie)[:, self.level]
        return np.arange(rows.size), nodes.cpu().numpy().astype(np.int64)

    def items(self, groups: np.ndarray) -> np.ndarray:
        """Returns the rows of the leaves below each node."""
        below = self.trie.leaves(on_device(groups, self.trie.device, torch.int64))
        # Leaves below a node are consecutive ranks first : last.
        edges = zip(below.first.tolist(), below.last.tolist(), strict=True)
        rows = self.trie.leaf_rows
        found = [rows[first:last] for first, last in edges]
        return torch.cat([rows[:0], *found]).cpu().numpy()
