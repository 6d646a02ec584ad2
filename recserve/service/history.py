"""A user's events as rows of a catalogue version."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass

import numpy as np

from recserve.bounds import MIN_TIME_US
from recserve.features.catalog.versions import CatalogVersion

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MICROSECOND = datetime.timedelta(microseconds=1)


@dataclass(frozen=True)
class History:
    """A user's events, oldest first, without the events of unknown items.

    Attributes:
        rows: [n] int64 item rows.
        times: [n] int64 microseconds since 1970, or positions for events without a timestamp.
        types: [n] int64 numbers of the event types, see `EventTypes`.
        values: [n] float32 event values.
        num_events: Number of events, including those of unknown items.
        degraded: Reasons why the history is incomplete.
    """

    rows: np.ndarray
    times: np.ndarray
    types: np.ndarray
    values: np.ndarray
    num_events: int
    degraded: tuple[str, ...] = ()

    @property
    def dated(self) -> np.ndarray:
        """[n] bool: True for events with a timestamp, False for those with a position only."""
        return self.times >= MIN_TIME_US

    def rows_within(self, seconds: float) -> np.ndarray:
        """Returns the item rows of recent events.

        Args:
            seconds: Age limit of an event. Events without a timestamp are always included.
        """
        since = time.time_ns() // 1000 - int(seconds * 1e6)
        return self.rows[~self.dated | (self.times >= since)]


EMPTY_HISTORY = History(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32), 0
)


@dataclass(frozen=True)
class Revision:
    """A history that changed in another way than by appending events.

    Attributes:
        before: The history before the change.
        after: The history after the change; None if the user has been deleted.
    """

    before: History
    after: History | None


def known_events(stored: np.ndarray, items: CatalogVersion) -> History:
    """Returns the stored events (EVENT_DTYPE) whose items a version of the catalogue knows."""
    rows = items.rows_of_keys(np.ascontiguousarray(stored["item_key"]))
    degraded: tuple[str, ...] = ()
    total = rows.size
    if total and rows.min() < 0:
        stored, rows = stored[rows >= 0], rows[rows >= 0]
        degraded = ("unknown_history_items",)
    return History(
        rows,
        stored["time_us"].astype(np.int64),
        stored["type"].astype(np.int64),
        stored["value"].astype(np.float32),
        total,
        degraded,
    )
