"""Reference loops for caps: which items a slate holds, and which may still join it."""

from collections import Counter

import numpy as np


def groups_of(rows, caps):
    """Returns all groups of each item row, with the number and limit of their caps."""
    found = {row: set() for row in rows}
    for c, cap in enumerate(caps):
        places, groups = cap.groups.of(np.array(rows, np.int64))
        for place, group in zip(places.tolist(), groups.tolist(), strict=True):
            found[rows[place]].add(((c, group), cap.limit))
    return found


def plain_first_k(rows, caps, k):
    """Returns item rows in order, each if all of its groups are below their limits."""
    counts, kept, groups = Counter(), [], groups_of(rows, caps)
    for row in rows:
        mine = groups[row]
        if len(kept) < k and all(counts[key] < limit for key, limit in mine):
            counts.update(key for key, _ in mine)
            kept.append(row)
    return kept


def plain_open(rows, caps, items):
    """Returns the items that may join the chosen ones."""
    groups = groups_of([*rows, *items], caps)
    counts = Counter(key for row in rows for key, _ in groups[row])
    return [
        row
        for row in items
        if row not in rows and all(counts[key] < limit for key, limit in groups[row])
    ]
