"""Tables by item row that go on after, or differ from, a base that nobody copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


class Growing:
    """Rows that are only ever appended, with spare capacity; views of it never change."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype | type) -> None:
        """shape: of one row."""
        self._rows = np.empty((64, *shape), dtype)
        self.count = 0

    def append(self, rows: np.ndarray) -> None:
        """Add rows [n, ...]. One writer at a time; readers of views are not disturbed."""
        count = self.count + len(rows)
        if count > len(self._rows):
            shape = (max(count, 2 * len(self._rows)), *self._rows.shape[1:])
            grown = np.empty(shape, self._rows.dtype)
            grown[: self.count] = self._rows[: self.count]
            self._rows = grown
        self._rows[self.count : count] = rows
        self.count = count

    def view(self, count: int) -> np.ndarray:
        """The first `count` rows."""
        return self._rows[:count]


@dataclass(frozen=True)
class Extended:
    """base [I, ...] and the rows after it: row I + i is `tail[i]`."""

    base: np.ndarray
    tail: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """As of an array."""
        return (len(self), *self.base.shape[1:])

    def __len__(self) -> int:
        return len(self.base) + len(self.tail)

    def __getitem__(self, rows: np.ndarray | int) -> np.ndarray:
        rows, known = np.asarray(rows), len(self.base)
        found = self.base[np.minimum(rows, known - 1)]
        later = rows >= known
        if not later.any():
            return np.asarray(found)
        return _where(later, self.tail[np.maximum(rows - known, 0)], found)


@dataclass(frozen=True)
class Patched:
    """base [I, ...] with other values at some rows, and perhaps more rows, out of num_rows.

    rows [p] ascending: where they are; every row from I on is among them. places [p]: their
    values, as places in `values`.
    """

    base: np.ndarray
    num_rows: int
    rows: np.ndarray
    places: np.ndarray
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """As of an array."""
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


Table = np.ndarray | Extended | Patched


def _where(condition: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """np.where by leading axes."""
    wide = condition.reshape(condition.shape + (1,) * (one.ndim - condition.ndim))
    return np.asarray(np.where(wide, one, other))


def are_among(rows: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """[n] bool: which rows are there."""
    if not ascending.size:
        return np.zeros(rows.shape, dtype=bool)
    at = np.minimum(np.searchsorted(ascending, rows), ascending.size - 1)
    return np.asarray(ascending[at] == rows)
