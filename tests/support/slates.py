"""Plain greedy loops over caps: which items a slate holds, and which may still join it."""

from collections import Counter

import numpy as np


def groups_of(rows, caps):
    """By item row: every group of it, with its cap's number and limit."""
    found = {row: set() for row in rows}
    for c, cap in enumerate(caps):
        places, groups = cap.groups.of(np.array(rows, np.int64))
        for place, group in zip(places.tolist(), groups.tolist(), strict=True):
            found[rows[place]].add(((c, group), cap.limit))
    return found


def plain_first_k(rows, caps, k):
    """Item rows, one after the other, each if all of its groups have a place left."""
    counts, kept, groups = Counter(), [], groups_of(rows, caps)
    for row in rows:
        mine = groups[row]
        if len(kept) < k and all(counts[key] < limit for key, limit in mine):
            counts.update(key for key, _ in mine)
            kept.append(row)
    return kept


def plain_open(rows, caps, items):
    """Of the items those that could stand beside the chosen ones."""
    groups = groups_of([*rows, *items], caps)
    counts = Counter(key for row in rows for key, _ in groups[row])
    return [
        row
        for row in items
        if row not in rows and all(counts[key] < limit for key, limit in groups[row])
    ]
