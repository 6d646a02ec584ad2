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


def plain_minimums(rows, more, wanted, caps, k):
    """Returns the slate with items of each kind, where they are few.

    Args:
        rows: The slate.
        more: For each kind, further items, best first.
        wanted: For each kind, the least number and all its items.
        caps: The caps.
        k: Most items.
    """

    def fits(chosen, row):
        return plain_first_k([*chosen, row], caps, len(chosen) + 1) == [*chosen, row]

    if all(len(kind & set(rows)) >= count for count, kind in wanted):
        return rows
    chosen = []
    for (count, kind), found in zip(wanted, more, strict=True):
        for row in [*(row for row in rows if row in kind), *found]:
            if len(kind & set(chosen)) < count and row not in chosen and fits(chosen, row):
                chosen.append(row)
    for row in rows:
        if len(chosen) < k and row not in chosen and fits(chosen, row):
            chosen.append(row)
    return [row for row in rows if row in chosen] + [row for row in chosen if row not in rows]
