"""Counts co-occurrence: which items the same users had, and how many users."""

from __future__ import annotations

import numpy as np

from recserve.features.tables.events import EventLog

WINDOW = 20
MAX_NEIGHBOURS = 64
CHUNK = 200_000


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
    keys = np.zeros(0, dtype=np.int64)
    counts = np.zeros(0, dtype=np.int64)
    users = train.user_indices()
    steps = np.arange(0, train.num_events + CHUNK, CHUNK)
    cuts = np.searchsorted(train.offsets, steps).clip(max=train.num_users)
    # Chunks of whole users bound the memory of the pair list.
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        part = slice(int(train.offsets[first]), int(train.offsets[last]))
        found = _pairs(users[part] - first, train.item_rows[part].astype(np.int64), num_items)
        keys, where = np.unique(np.concatenate([keys, found]), return_inverse=True)
        weights = np.concatenate([counts, np.ones(found.size, dtype=np.int64)])
        counts = np.bincount(where, weights, keys.size).astype(np.int64)
    left, right = np.divmod(keys, num_items)
    # Cosine up to a factor that is the same for all neighbours of `left`.
    strength = counts / np.sqrt(np.maximum(train.counts(num_items)[right], 1))
    order = np.lexsort((right, -strength, left))
    starts = np.searchsorted(left, np.arange(num_items + 1))
    kept = order[np.arange(order.size) - starts[left[order]] < MAX_NEIGHBOURS]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(left[kept], minlength=num_items))])
    return offsets, right[kept].astype(np.int32), counts[kept].astype(np.float32)


def _pairs(users: np.ndarray, rows: np.ndarray, num_items: int) -> np.ndarray:
    """Returns keys `left * I + right` of all pairs in the window, both ways, once per user."""
    found = []
    for lag in range(1, min(WINDOW, rows.size - 1) + 1):
        same = (users[lag:] == users[:-lag]) & (rows[lag:] != rows[:-lag])
        early, late, owner = rows[:-lag][same], rows[lag:][same], users[lag:][same]
        # The user is part of the key, so that `unique` counts each pair once per user.
        base = owner * num_items * num_items
        found += [base + early * num_items + late, base + late * num_items + early]
    if not found:
        return np.zeros(0, dtype=np.int64)
    return np.unique(np.concatenate(found)) % (num_items * num_items)
