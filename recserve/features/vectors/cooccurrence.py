"""Counts co-occurrence: which items the same users had, and how many users."""

from __future__ import annotations

import numpy as np

from recserve.features.tables.events import EventLog

WINDOW = 20
MAX_NEIGHBOURS = 64
CHUNK = 200_000
RANGE_EVENTS = 1 << 19  # of the items whose pairs are counted at once


def neighbours(train: EventLog, num_items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns co-occurring items as compressed sparse rows.

    Two items co-occur if a user had both at most 20 events apart.

    Args:
        train: Training events.
        num_items: I, the number of items.

    Returns:
        Offsets [I+1] int64, neighbours int32 (at most 64 per item, strongest first), and float32
        numbers of users that had both items.
    """
    # Cosine up to a factor that is the same for all neighbours of an item.
    scales = np.sqrt(np.maximum(train.counts(num_items), 1))
    parts = [
        _strongest(train, num_items, scales, first, last)
        for first, last in train.item_ranges(num_items, RANGE_EVENTS)
    ]
    sizes, rows, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return offsets, rows.astype(np.int32), counts.astype(np.float32)


def _strongest(
    train: EventLog, num_items: int, scales: np.ndarray, first: int, last: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the neighbours of the items `first` to `last`: how many, which, and their users."""
    steps = np.arange(0, train.num_events + CHUNK, CHUNK)
    cuts = np.searchsorted(train.offsets, steps).clip(max=train.num_users)
    lengths, found = train.lengths(), [np.zeros(0, np.int64)]
    # Chunks of whole users bound the memory of the pairs before each counts once per user.
    for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        part = slice(int(train.offsets[start]), int(train.offsets[stop]))
        users = np.repeat(np.arange(stop - start), lengths[start:stop])
        rows = train.item_rows[part].astype(np.int64)
        found.append(_pairs(users, rows, num_items, first, last))
    keys, counts = np.unique(np.concatenate(found), return_counts=True)
    left, right = np.divmod(keys, num_items)
    order = np.lexsort((right, -(counts / scales[right]), left))
    starts = np.searchsorted(left, np.arange(first, last + 1))
    kept = order[np.arange(order.size) - starts[left[order] - first] < MAX_NEIGHBOURS]
    sizes = np.bincount(left[kept] - first, minlength=last - first)
    return sizes, right[kept], counts[kept]


def _pairs(
    users: np.ndarray, rows: np.ndarray, num_items: int, first: int, last: int
) -> np.ndarray:
    """Returns keys `left * I + right` of pairs in the window, both ways, once per user.

    Only those are returned whose left item is one of `first` to `last`.
    """
    found = []
    for lag in range(1, min(WINDOW, rows.size - 1) + 1):
        same = (users[lag:] == users[:-lag]) & (rows[lag:] != rows[:-lag])
        for left, right in ((rows[:-lag], rows[lag:]), (rows[lag:], rows[:-lag])):
            own = same & (left >= first) & (left < last)
            # The user is part of the key, so that `unique` counts each pair once per user.
            base = users[lag:][own] * num_items * num_items
            found.append(base + left[own] * num_items + right[own])
    if not found:
        return np.zeros(0, dtype=np.int64)
    return np.unique(np.concatenate(found)) % (num_items * num_items)
