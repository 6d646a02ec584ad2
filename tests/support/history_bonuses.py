"""History bonuses for tests."""

from __future__ import annotations

import numpy as np

from recserve.models.history_bonus import DECAY, RECENT, HistoryBonus


def bonus_of(table: np.ndarray, repeat: float) -> HistoryBonus:
    """Returns a bonus whose links are the entries of `table` [I, I] that are not 0."""
    items, rows = table.nonzero()
    offsets = np.concatenate([[0], np.cumsum(np.bincount(items, minlength=len(table)))])
    links = table[items, rows].astype(np.float32)
    return HistoryBonus(offsets.astype(np.int64), rows.astype(np.int32), links, repeat)


def bonus_by_hand(table: np.ndarray, repeat: float, history: np.ndarray, width: int) -> np.ndarray:
    """Returns [width] bonus of each item by the formula, item by item."""
    found = np.zeros(width)
    for back, item in enumerate(history[::-1][:RECENT].tolist()):
        if item < len(table):
            found[: len(table)] += DECAY**back * table[item]
    found[list(set(history.tolist()))] += repeat
    return found
