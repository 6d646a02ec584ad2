"""What users were shown: a record beside their events, and the showings that count.

A showing counts if the user has had no positive event of the item since. There are three sources:

    events of a `read` type             in the user's history
    `shown_ids` of a request            in the record
    answers, with `shown_from_answers`  in the record

The record is a history of its own in the history store, under an id that no client can use. So it
has the bounds of a history: the store's cap, its checksum, and the age at which events expire. It
is written by a thread, behind the answer. What is not written yet is read all the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from recserve.bounds import MAX_ID_LENGTH, MIN_TIME_US
from recserve.features.catalog.catalog import item_key
from recserve.features.catalog.versions import CatalogVersion
from recserve.features.history.history import (
    MAX_CAP,
    CorruptHistory,
    HistoryStore,
    StoredEvent,
    event_key,
    merge,
)
from recserve.features.history.stores import CLOSE_S
from recserve.service.history import History

log = logging.getLogger(__name__)

MAX_PENDING = 200_000  # showings that wait to be written; more are dropped, with a warning
ID_BEGINNING = 60  # characters of a user id that begin the id of its record


@dataclass(frozen=True)
class Showings:
    """Showings to one user without a positive event of the item since.

    Attributes:
        rows: [n] int64 item rows.
        times: [n] int64 microseconds since 1970.
    """

    rows: np.ndarray
    times: np.ndarray

    @staticmethod
    def of(record: np.ndarray, history: History, items: CatalogVersion) -> Showings:
        """Returns the showings of a record and a history.

        A showing without a time does not count. A positive event without a time is later than each
        showing.

        Args:
            record: EVENT_DTYPE array of the user's record.
            history: The user's events.
            items: Catalogue version that maps items to rows.
        """
        recorded = items.rows_of_keys(np.ascontiguousarray(record["item_key"]))
        rows = np.concatenate([recorded, history.read_rows])
        times = np.concatenate([record["time_us"], history.read_times])
        counted = (rows >= 0) & (times >= MIN_TIME_US)
        if history.rows.size:
            wanted, place = np.unique(history.rows, return_inverse=True)
            latest = np.zeros(wanted.size, np.int64)
            dated = history.times >= MIN_TIME_US
            clicked = np.where(dated, history.times, np.iinfo(np.int64).max)
            np.maximum.at(latest, place, clicked)
            at = np.minimum(np.searchsorted(wanted, rows), wanted.size - 1)
            counted &= (wanted[at] != rows) | (times > latest[at])
        return Showings(rows[counted], times[counted])

    def counts(self, since_us: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows [n] of the items shown since a time, ascending, and how often [n]."""
        return np.unique(self.rows[self.times >= since_us], return_counts=True)


class ShownItems:
    """The records of what users were shown, in the history store. Thread-safe.

    Attributes:
        store: The history store.
        from_answers: Whether each answer to a user counts as shown.
        clock: Returns the present time in microseconds since 1970.
    """

    def __init__(self, store: HistoryStore, from_answers: bool = False) -> None:
        self.store, self.from_answers = store, from_answers
        self.clock: Callable[[], int] = lambda: time.time_ns() // 1000
        self._changed = threading.Condition()
        self._pending: dict[str, list[StoredEvent]] = {}
        self._in_flight: dict[str, list[StoredEvent]] = {}  # the thread writes them now
        self._num_pending = 0
        self._closing = False
        self._writing = threading.Lock()  # held while records are written or deleted
        self._thread: threading.Thread | None = None  # started by the first showing

    def add(self, user_id: str, item_ids: Iterable[str], request_id: str) -> None:
        """Records that a user was shown items; it returns at once.

        Args:
            user_id: The user, whose id a store can hold.
            item_ids: The items.
            request_id: Request that said so. A request that is repeated counts once.
        """
        now_us = self.clock()
        events = [StoredEvent(item_key(i), now_us, showing_key(request_id, i)) for i in item_ids]
        with self._changed:
            if self._closing or self._num_pending + len(events) > MAX_PENDING:
                log.warning("%d items that a user was shown are not recorded", len(events))
                return
            self._pending.setdefault(user_id, []).extend(events)
            self._num_pending += len(events)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shown", daemon=True)
                self._thread.start()
            self._changed.notify()

    def read(self, user_id: str) -> np.ndarray:
        """Returns the record of a user as an EVENT_DTYPE array, within the time of a request.

        Raises:
            StoreUnavailable: If the store does not answer.
            CorruptHistory: If the record is damaged.
        """
        with self._changed:
            waiting = [*self._in_flight.get(user_id, ()), *self._pending.get(user_id, ())]
        stored = self.store.read(record_id(user_id))
        return merge(stored, waiting, MAX_CAP).history if waiting else stored

    def delete(self, user_id: str) -> None:
        """Deletes the record of a user, also what is not written yet. Raises StoreUnavailable."""
        with self._writing:
            with self._changed:
                self._num_pending -= len(self._pending.pop(user_id, ()))
            self.store.delete(record_id(user_id))

    def close(self) -> bool:
        """Writes what waits, within CLOSE_S. Returns whether all calls of the store have ended."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("what users were shown last is not recorded: the history store does not end")
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
            with self._writing:
                with self._changed:
                    self._in_flight, self._pending, self._num_pending = self._pending, {}, 0
                self._write(self._in_flight)
                with self._changed:
                    self._in_flight = {}

    def _write(self, events: dict[str, list[StoredEvent]]) -> None:
        try:
            stored = self.store.append_many({record_id(user): new for user, new in events.items()})
        except Exception as error:  # of a plug-in's store too; later showings may be written
            log.warning("what %d users were shown is not recorded: %s", len(events), error)
            return
        damaged = sum(isinstance(applied, CorruptHistory) for applied in stored.values())
        if damaged:
            log.warning("the records of what %d users were shown are damaged", damaged)


def record_id(user_id: str) -> str:
    """Returns the id under which the store has the record of a user.

    It is longer than any id that a route accepts. It begins as the user's id does, so that a page
    of users holds few of them.
    """
    digest = blake2b(user_id.encode(), digest_size=16).hexdigest()
    return f"{user_id[:ID_BEGINNING]}:shown:{digest}:".ljust(MAX_ID_LENGTH + 44, ".")


def showing_key(request_id: str, item_id: str) -> int:
    """Returns the key of a showing, by which a repeated request counts once."""
    return event_key(f"shown\0{request_id}\0{item_id}")
