"""Groups of items by the values of a column, of a bundle and of its later versions.

A cap of a request limits the items of each group. A column is any that filters can read. An item
with several values belongs to several groups, and an item without a value to none.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from recserve.features.catalog.filter_columns import Memberships
from recserve.features.catalog.filters import GroupBy, ItemFilters
from recserve.features.catalog.versions import CatalogVersion

# Columns whose groups stay in memory. Each takes 32 bytes per item and value.
MAX_GROUPINGS = 16


@dataclass(frozen=True)
class GroupIndex:
    """Groups of the bundle's own items, in both directions.

    Attributes:
        offsets: [I + 1] int64; item row i belongs to `groups[offsets[i] : offsets[i + 1]]`.
        groups: [m] int64 groups, in the order of item rows.
        ordered: [m] int64 the same groups in ascending order.
        rows: [m] int64 item row of each entry of `ordered`.
    """

    offsets: np.ndarray
    groups: np.ndarray
    ordered: np.ndarray
    rows: np.ndarray

    @staticmethod
    def of_members(members: Memberships, num_items: int) -> GroupIndex:
        """Builds the arrays. The number of a group is the place of its value in `members.keys`."""
        by_row = np.lexsort((members.values, members.rows))
        by_group = np.lexsort((members.rows, members.values))
        offsets = np.zeros(num_items + 1, np.int64)
        np.cumsum(np.bincount(members.rows, minlength=num_items), out=offsets[1:])
        return GroupIndex(
            offsets, members.values[by_row], members.values[by_group], members.rows[by_group]
        )

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns index pairs (position in `rows`, group), as defined in core/diversity.py."""
        # Row i of `rows` owns counts[i] consecutive pairs. `place` repeats i, and `inner` counts
        # 0..counts[i] - 1 within the run.
        counts = self.offsets[rows + 1] - self.offsets[rows]
        place = np.repeat(np.arange(rows.size), counts)
        inner = np.arange(place.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return place, self.groups[self.offsets[rows][place] + inner]

    def items(self, group: int) -> np.ndarray:
        """Returns the item rows of a group."""
        first, last = (np.searchsorted(self.ordered, group, side) for side in ("left", "right"))
        return self.rows[first:last]


class BundleGroups:
    """Numbers the values of one column, of a bundle and of its later versions. Thread-safe.

    Attributes:
        by: The column.
        index: Groups of the bundle's own items.
    """

    def __init__(self, filters: ItemFilters, by: GroupBy) -> None:
        """Builds the index of the bundle's own items, whose filters are given."""
        members = filters.group_column(by).memberships()
        self.by = by
        self.index = GroupIndex.of_members(members, filters.num_items)
        self._keys: list[Hashable] = list(members.keys)
        self._numbers = {key: number for number, key in enumerate(members.keys)}
        self._lock = threading.Lock()

    def number(self, key: Hashable) -> int:
        """Returns the group of a value; a new value gets a new number."""
        number = self._numbers.get(key)
        if number is None:
            with self._lock:
                number = self._numbers.get(key)
                if number is None:
                    number = len(self._keys)
                    self._keys.append(key)  # stored before another thread can see the number
                    self._numbers[key] = number
        return number

    def key(self, group: int) -> Hashable:
        """Returns the value of a group."""
        return self._keys[group]


class Groupings:
    """The groups of a bundle by column, of the columns that requests limited last. Thread-safe."""

    def __init__(self, filters: ItemFilters) -> None:
        """Starts without any; `filters` are those of the bundle's own items."""
        self._filters = filters
        self._groups: OrderedDict[GroupBy, BundleGroups] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, by: GroupBy) -> BundleGroups:
        """Returns the groups of a column; the first call for a column reads all items."""
        with self._lock:
            found = self._groups.get(by)
            if found is None:
                found = self._groups[by] = BundleGroups(self._filters, by)
                if len(self._groups) > MAX_GROUPINGS:
                    self._groups.popitem(last=False)
            else:
                self._groups.move_to_end(by)
            return found


@dataclass(frozen=True)
class VersionGroups:
    """Groups of one catalogue version, with the interface of core/diversity.py.

    Attributes:
        version: The version; its changed items override the bundle's groups.
        bundle: Groups of the bundle's own items, and the numbers of all groups.
    """

    version: CatalogVersion
    bundle: BundleGroups

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns index pairs (position in `rows`, group), one per value of an item."""
        version = self.version
        changed = np.isin(rows, version.record_rows)
        old = np.flatnonzero(~changed)
        place, group = self.bundle.index.of(rows[old])
        if not changed.any():
            return old[place], group
        records = version.log.groups(self.bundle.by, version.num_records)
        others = np.flatnonzero(changed)
        at = version.record_places[np.searchsorted(version.record_rows, rows[others])]
        pairs = [
            (place, self.bundle.number(key))
            for place, record in zip(others.tolist(), at.tolist(), strict=True)
            for key in records.keys[record]
        ]
        new = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return np.concatenate([old[place], new[:, 0]]), np.concatenate([group, new[:, 1]])

    def items(self, groups: np.ndarray) -> np.ndarray:
        """Returns the item rows of all given groups in this version."""
        version, rows = self.version, [np.zeros(0, np.int64)]
        rows += [self.bundle.index.items(group) for group in groups.tolist()]
        old = np.concatenate(rows)
        if not version.record_rows.size:
            return old
        places: list[int] = []
        records = version.log.groups(self.bundle.by, version.num_records)
        for group in groups.tolist():
            found = records.places.get(self.bundle.key(group), [])
            places += found[: bisect_left(found, version.num_records)]
        new = version.record_rows[np.isin(version.record_places, places)]
        return np.concatenate([old[~np.isin(old, version.record_rows)], new])
