"""Explicit groups of items: item row i has `groups[offsets[i] : offsets[i + 1]]`."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ListedGroups:
    """Groups of each item row in two arrays."""

    offsets: np.ndarray
    groups: np.ndarray

    def one(self, row):
        """Returns the groups of one row."""
        return set(self.groups[self.offsets[row] : self.offsets[row + 1]].tolist())

    def of(self, rows):
        """Returns pairs of a position in `rows` and a group."""
        pairs = [(place, g) for place, row in enumerate(rows.tolist()) for g in self.one(row)]
        places, groups = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return places, groups

    def items(self, groups):
        """Returns the rows of all items in any of these groups."""
        asked = set(groups.tolist())
        rows = [row for row in range(self.offsets.size - 1) if self.one(row) & asked]
        return np.array(rows, dtype=np.int64)
