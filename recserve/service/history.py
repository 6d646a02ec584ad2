"""A user's events as rows of a catalogue version.

The newest event of a user and an item decides, `read` ones aside. If it is negative, the item is
hidden from the user, and his earlier events of it are not in the history.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass, field, replace

import numpy as np

from recserve.bounds import MIN_TIME_US
from recserve.features.catalog.versions import CatalogVersion
from recserve.features.history.event_kinds import NEGATIVE, POSITIVE, READ
from recserve.features.history.event_weights import disliked_items
from recserve.service.event_types import EventTypes

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
NOTHING = np.zeros(0, np.int64)
MICROSECOND = datetime.timedelta(microseconds=1)


@dataclass(frozen=True)
class History:
    """A user's positive events, oldest first, without events of unknown and hidden items.

    Attributes:
        rows: [n] int64 item rows.
        times: [n] int64 microseconds since 1970, or positions for events without a timestamp.
        types: [n] int64 numbers of the event types, see `EventTypes`.
        values: [n] float32 event values.
        num_events: Number of events, including those that the history leaves out.
        degraded: Reasons why the history is incomplete.
        hidden: [h] int64 rows of the items that the user does not want.
        read_rows: [r] int64 item rows of `read` events.
        read_times: [r] int64 times of `read` events.
        disliked_rows: [d] int64 rows of unwanted items that lower similar ones, newest first.
        disliked_weights: [d] float32 weight of each.
    """

    rows: np.ndarray
    times: np.ndarray
    types: np.ndarray
    values: np.ndarray
    num_events: int
    degraded: tuple[str, ...] = ()
    hidden: np.ndarray = field(default_factory=lambda: NOTHING)
    read_rows: np.ndarray = field(default_factory=lambda: NOTHING)
    read_times: np.ndarray = field(default_factory=lambda: NOTHING)
    disliked_rows: np.ndarray = field(default_factory=lambda: NOTHING)
    disliked_weights: np.ndarray = field(default_factory=lambda: NOTHING)

    @property
    def seen_rows(self) -> np.ndarray:
        """[n + r] int64 item rows of positive and `read` events."""
        return np.concatenate([self.rows, self.read_rows]) if self.read_rows.size else self.rows

    @property
    def seen_times(self) -> np.ndarray:
        """[n + r] int64 times of these events."""
        return np.concatenate([self.times, self.read_times]) if self.read_rows.size else self.times

    @property
    def without_read(self) -> History:
        """The history without `read` events."""
        return replace(self, read_rows=NOTHING, read_times=NOTHING)

    @property
    def dated(self) -> np.ndarray:
        """[n + r] bool: True for events with a timestamp, False for those with a position only."""
        return self.seen_times >= MIN_TIME_US

    def rows_within(self, seconds: float) -> np.ndarray:
        """Returns the item rows of recent positive and `read` events.

        Args:
            seconds: Age limit of an event. Events without a timestamp are always included.
        """
        since = time.time_ns() // 1000 - int(seconds * 1e6)
        return self.seen_rows[~self.dated | (self.seen_times >= since)]


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


def wanted_events(stored: np.ndarray, items: CatalogVersion, types: EventTypes) -> History:
    """Returns the history that stored events (EVENT_DTYPE) make.

    Raises:
        StoreUnavailable: If a type's name has to be read and the store does not answer.
        CorruptHistory: If the store has no name for a type.
    """
    known = known_events(stored, items)
    kinds = types.kinds_of(known.types, known.values)
    if not kinds.any():  # all are positive
        return known
    judged = np.flatnonzero(kinds != READ)[::-1]  # newest first
    rows, newest = np.unique(known.rows[judged], return_index=True)
    hidden = rows[kinds[judged[newest]] == NEGATIVE]
    kept = (kinds == POSITIVE) & ~np.isin(known.rows, hidden)
    read = kinds == READ
    disliked = NOTHING, NOTHING
    if types.weights.entries and hidden.size:
        weights = types.weights_of(known.types, known.values, other=0.0)
        disliked = disliked_items(known.rows, kinds, weights)
    return replace(
        known,
        rows=known.rows[kept],
        times=known.times[kept],
        types=known.types[kept],
        values=known.values[kept],
        hidden=hidden,
        read_rows=known.rows[read],
        read_times=known.times[read],
        disliked_rows=disliked[0],
        disliked_weights=disliked[1],
    )


def known_events(stored: np.ndarray, items: CatalogVersion) -> History:
    """Returns all stored events (EVENT_DTYPE) of items that a version of the catalogue knows.

    Those of all kinds are in `rows`.
    """
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
