"""Tables by item row that extend or override a shared base without copying it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Generic, TypeVar

import numpy as np


class GrowableArray:
    """An append-only array with spare capacity. Existing views never change."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype | type) -> None:
        """Starts an empty table.

        Args:
            shape: Shape of one row.
            dtype: Type of the elements.
        """
        self._rows = np.empty((64, *shape), dtype)
        self.count = 0

    def append(self, rows: np.ndarray) -> None:
        """Appends rows [n, ...]. Only one thread may append; other threads may read views."""
        count = self.count + len(rows)
        if count > len(self._rows):
            shape = (max(count, 2 * len(self._rows)), *self._rows.shape[1:])
            grown = np.empty(shape, self._rows.dtype)
            grown[: self.count] = self._rows[: self.count]
            self._rows = grown
        self._rows[self.count : count] = rows
        self.count = count

    def view(self, count: int) -> np.ndarray:
        """Returns the first `count` rows without copying."""
        return self._rows[:count]


@dataclass(frozen=True)
class ExtendedArray:
    """A base array followed by a tail: row I + i is `tail[i]`.

    Attributes:
        base: [I, ...] first rows.
        tail: [t, ...] later rows.
    """

    base: np.ndarray
    tail: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, as of an array."""
        return (len(self), *self.base.shape[1:])

    def __len__(self) -> int:
        return len(self.base) + len(self.tail)

    def __getitem__(self, rows: np.ndarray | int) -> np.ndarray:
        rows, known = np.asarray(rows), len(self.base)
        # Clamp both lookups into range and select the valid one below.
        found = self.base[np.minimum(rows, known - 1)]
        later = rows >= known
        if not later.any():
            return np.asarray(found)
        return _where(later, self.tail[np.maximum(rows - known, 0)], found)


@dataclass(frozen=True)
class PatchedArray:
    """A base array with other values at some rows, and possibly more rows.

    Attributes:
        base: [I, ...] unchanged rows.
        num_rows: Number of rows, at least I.
        rows: [p] ascending rows with other values. It includes all rows from I on.
        places: [p] index in `values` of each such row.
        values: [v, ...] other values.
    """

    base: np.ndarray
    num_rows: int
    rows: np.ndarray
    places: np.ndarray
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, as of an array."""
        return (self.num_rows, *self.base.shape[1:])

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, rows: np.ndarray | int) -> np.ndarray:
        rows = np.asarray(rows)
        found = self.base[np.minimum(rows, len(self.base) - 1)]
        if not self.rows.size:
            return np.asarray(found)
        at = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return _where(self.rows[at] == rows, self.values[self.places[at]], found)


Table = np.ndarray | ExtendedArray | PatchedArray


def _where(condition: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """np.where with a condition over the leading axes."""
    wide = condition.reshape(condition.shape + (1,) * (one.ndim - condition.ndim))
    return np.asarray(np.where(wide, one, other))


def are_among(rows: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Returns [n] bool, True for rows that occur in an ascending array."""
    if not ascending.size:
        return np.zeros(rows.shape, dtype=bool)
    at = np.minimum(np.searchsorted(ascending, rows), ascending.size - 1)
    return np.asarray(ascending[at] == rows)


K = TypeVar("K")
MAX_RECENT = 1024


@dataclass(frozen=True)
class RowMap(Generic[K]):
    """Three layers of rows by key. A later layer overrides an earlier one, and -1 means no row.

    A change copies `recent` only. Once `recent` exceeds 1024 entries, it is merged into a copy of
    `older`.

    Attributes:
        base: Rows of the bundle.
        older: Changes that were merged.
        recent: Latest changes, at most 1024.
    """

    base: Mapping[K, int]
    older: Mapping[K, int] = field(default_factory=dict)
    recent: Mapping[K, int] = field(default_factory=dict)

    def get(self, key: K) -> int:
        """Returns the row of a key, or -1."""
        return self.recent.get(key, self.older.get(key, self.base.get(key, -1)))

    def __contains__(self, key: K) -> bool:
        """Whether the map has or had a row of a key."""
        return key in self.base or key in self.older or key in self.recent

    def get_many(self, keys: Iterable[K]) -> list[int]:
        """Returns the row of each key, or -1."""
        keys = list(keys)
        found: Iterable[int] = map(self.base.get, keys, repeat(-1))
        for layer in (self.older, self.recent):
            if layer:
                found = map(layer.get, keys, found)
        return list(found)

    def removed_keys(self) -> list[K]:
        """Returns the keys whose latest change removed their row."""
        return [key for key, row in {**self.older, **self.recent}.items() if row < 0]

    def with_rows(self, changes: Mapping[K, int]) -> RowMap[K]:
        """Returns a map with changed rows."""
        recent = {**self.recent, **changes}
        if len(recent) <= MAX_RECENT:
            return RowMap(self.base, self.older, recent)
        return RowMap(self.base, {**self.older, **recent})
