"""When items may be recommended: from `available_from` on, until `expires_at`.

A version of the catalogue lists only the items that have a time. Times are in microseconds since
1970. `next_change` says how long the answer of `outside` holds, so that a request compares one
number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recserve.bounds import MAX_TIME_US
from recserve.features.tables.arrays import are_among
from recserve.features.tables.items import AVAILABLE_FROM, EXPIRES_AT, ItemTable

NO_START, NO_END, NOT_ADDED = 0, MAX_TIME_US, 0


@dataclass(frozen=True)
class ItemTimes:
    """The times of the w items that have one.

    Attributes:
        rows: [w] int64 ascending item rows.
        starts: [w] int64 `available_from`; NO_START without it.
        ends: [w] int64 `expires_at`; NO_END without it.
        added: [w] int64 time at which a live catalogue got the item; NOT_ADDED for a bundle's item.
    """

    rows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    added: np.ndarray

    @staticmethod
    def of_table(items: ItemTable) -> ItemTimes:
        """Returns the times of a bundle's items."""
        starts = _micros(items.time(AVAILABLE_FROM), NO_START)
        ends = _micros(items.time(EXPIRES_AT), NO_END)
        rows = np.flatnonzero((starts != NO_START) | (ends != NO_END))
        return ItemTimes(rows, starts[rows], ends[rows], np.full(rows.size, NOT_ADDED))

    def override(self, rows: np.ndarray, times: np.ndarray) -> ItemTimes:
        """Returns the times after changes.

        Args:
            rows: [p] ascending rows of changed items.
            times: [p, 3] their starts, ends and times of addition.
        """
        if not rows.size:
            return self
        stay = ~are_among(self.rows, rows)
        timed = (times != (NO_START, NO_END, NOT_ADDED)).any(1)
        both = np.concatenate([self.rows[stay], rows[timed]])
        order = np.argsort(both)
        columns = zip((self.starts, self.ends, self.added), times[timed].T, strict=True)
        return ItemTimes(both[order], *(np.concatenate([a[stay], b])[order] for a, b in columns))

    def outside(self, now_us: int) -> np.ndarray:
        """Returns the ascending rows that may not be recommended at a time."""
        return self.rows[(self.starts > now_us) | (self.ends <= now_us)]

    def next_change(self, now_us: int) -> int | None:
        """Returns the first time after `now_us` at which an item begins or ends; None without."""
        bounds = np.concatenate([self.starts, self.ends[self.ends < NO_END]])
        return int(bounds.min()) if (bounds := bounds[bounds > now_us]).size else None

    @cached_property
    def newest(self) -> np.ndarray:
        """[w] int64 time that the list `latest` is sorted by; 0 for an item of unknown age."""
        return np.where(self.starts > NO_START, self.starts, self.added)


def _micros(column: pa.ChunkedArray, missing: int) -> np.ndarray:
    """Returns [I] int64 microseconds of a column of TIME_TYPE."""
    return np.asarray(pc.fill_null(column.cast(pa.int64()), missing).to_numpy())
