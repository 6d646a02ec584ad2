"""Reads and writes user histories; item ids become rows of the catalogue."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from recserve.bounds import MIN_TIME_US
from recserve.features.history.history import (
    Applied,
    Change,
    CorruptHistory,
    HistoryStore,
    StoredEvent,
    StoreUnavailable,
    user_key,
)
from recserve.schemas.events import EventsRequest, EventsResponse, HistoryEvent, HistoryResponse
from recserve.schemas.items import InvalidRequest, MissingField, Rejection, UserRef
from recserve.service.history.event_changes import EventChanges
from recserve.service.history.event_types import EventTypes
from recserve.service.snapshot import EMPTY_HISTORY, History, Snapshot

log = logging.getLogger(__name__)
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Rewritten:
    """A history that changed in another way than by appending events.

    Attributes:
        before: The history before the change.
        after: The history after the change; None if the user has been deleted.
    """

    before: History
    after: History | None


@dataclass(frozen=True)
class Added:
    """The result of storing the events of a request.

    Attributes:
        answer: The response, with counts and rejections.
        rewritten: By user id, the histories that changed in another way than by appending.
    """

    answer: EventsResponse
    rewritten: dict[str, Rewritten]


class Histories:
    """Reads and writes the history store.

    Attributes:
        store: The store.
        types: Event types of the store.
        default_value: Value of an event that does not have one.
        owns_store: True if `close` closes the store; False while another service owns it.
    """

    def __init__(self, store: HistoryStore, default_value: float = 1.0) -> None:
        self.store, self.types = store, EventTypes(store)
        self.default_value = default_value
        self.owns_store = True

    def read(
        self, user: UserRef | None, inline: Sequence[str] | None, snapshot: Snapshot
    ) -> History:
        """Returns the history of a request.

        If the store fails or is too slow, the history is empty and `degraded` names the reason.

        Args:
            user: The user whose history is read from the store.
            inline: Item ids, oldest first, that replace the stored history; None reads the store.
            snapshot: Catalogue version that maps items to rows.

        Raises:
            InvalidRequest: If both are missing, or if no store can hold the user id.
        """
        if user is not None:
            _check_user("user.id", user.id)
        if inline is not None:
            return self._inline(inline, snapshot)
        if user is None:
            raise MissingField("user", "is required without a history")
        try:
            stored = self.store.read(user.id)
        except StoreUnavailable as error:
            log.warning("the history store failed: %s", error)
            return replace(EMPTY_HISTORY, degraded=("history_unavailable",))
        except CorruptHistory as error:
            log.error("a stored history is damaged: %s", error)
            return replace(EMPTY_HISTORY, degraded=("history_damaged",))
        return _known(stored, snapshot)

    def add(self, body: EventsRequest, snapshot: Snapshot) -> Added:
        """Stores events and corrections; an invalid event does not affect the others.

        Raises:
            StoreUnavailable: If the store does not answer.
        """
        incoming = EventChanges(snapshot, self.types, self.default_value, self.store.ttl_s)
        for index, event in enumerate(body.events):
            incoming.take(index, event)
        taken = _Taken(rejected=list(incoming.rejected))
        rewritten: dict[str, Rewritten] = {}
        stored = self.store.append_many({u: [c for _, c in cs] for u, cs in incoming.users.items()})
        for user_id, applied in stored.items():
            taken.note(incoming.users[user_id], applied)
            if isinstance(applied, Applied) and (revised := applied.revised) is not None:
                before, after = (_known(h, snapshot) for h in (revised.before, revised.after))
                rewritten[user_id] = Rewritten(before, after)
        return Added(taken.answer(), rewritten)

    def listed(self, user_id: str, snapshot: Snapshot) -> HistoryResponse:
        """Returns a user's events with item ids, type names and timestamps.

        Raises:
            InvalidRequest: If no store can hold the user id.
            StoreUnavailable: If the store does not answer.
            CorruptHistory: If the stored events are damaged.
        """
        _check_user("user_id", user_id)
        history = _known(self.store.get(user_id), snapshot)
        item_id = snapshot.items.item_id
        names = self.types.names(history.types)
        columns = (history.rows.tolist(), history.times.tolist(), names)
        events = [
            HistoryEvent(item_id=item_id(row), type=name, timestamp=_moment(time_us))
            for row, time_us, name in zip(*columns, strict=True)
        ]
        unknown = history.num_events - len(events)
        return HistoryResponse(user_id=user_id, events=events, unknown_items=unknown)

    def delete(self, user_id: str, snapshot: Snapshot) -> History:
        """Deletes a user.

        Returns:
            The deleted history; empty if it was damaged.

        Raises:
            InvalidRequest: If no store can hold the user id.
            StoreUnavailable: If the store does not answer.
        """
        _check_user("user_id", user_id)
        try:
            history = _known(self.store.get(user_id), snapshot)
        except CorruptHistory:
            history = EMPTY_HISTORY
        self.store.delete(user_id)
        return history

    def close(self) -> None:
        """Closes the store, unless another service owns it."""
        if self.owns_store:
            self.store.close()

    def _inline(self, item_ids: Sequence[str], snapshot: Snapshot) -> History:
        found = snapshot.history_rows(item_ids)
        rows = found[found >= 0]
        zeros = np.zeros(rows.size, dtype=np.int64)
        values = np.full(rows.size, self.default_value, dtype=np.float32)
        degraded = ("unknown_history_items",) if rows.size < len(found) else ()
        return History(rows, zeros, zeros, values, len(found), degraded)


@dataclass
class _Taken:
    """Counts what happened to the events of a request.

    Attributes:
        rejected: Events that were not stored, with the reason.
        accepted: Number of new events.
        duplicates: Number of events that were stored before.
        corrected: Number of corrections that took effect.
    """

    rejected: list[Rejection]
    accepted: int = 0
    duplicates: int = 0
    corrected: int = 0

    def note(
        self, changes: Sequence[tuple[int, Change]], applied: Applied | CorruptHistory
    ) -> None:
        """Counts the changes of one user.

        Args:
            changes: Position in the request and change, for each event of the user.
            applied: Result of the store, or the error if the stored history is damaged.
        """
        if isinstance(applied, CorruptHistory):
            reason = "the stored history of this user is damaged; delete the user first"
            self.rejected += [Rejection(index=index, reason=reason) for index, _ in changes]
            return
        for (index, change), done in zip(changes, applied.taken, strict=True):
            if isinstance(change, StoredEvent):
                self.accepted += done
                self.duplicates += not done
            elif done:
                self.corrected += 1
            else:
                reason = "event_id: this user has no stored event with this id"
                self.rejected.append(Rejection(index=index, reason=reason))

    def answer(self) -> EventsResponse:
        """Returns the response; rejections are sorted by position in the request."""
        return EventsResponse(
            accepted=self.accepted,
            duplicates=self.duplicates,
            corrected=self.corrected,
            rejected=sorted(self.rejected, key=lambda rejection: rejection.index),
        )


def _known(stored: np.ndarray, snapshot: Snapshot) -> History:
    """Returns the stored events (EVENT_DTYPE) whose items the catalogue knows."""
    rows = snapshot.items.rows_of_keys(np.ascontiguousarray(stored["item_key"]))
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


def _check_user(param: str, user_id: str) -> None:
    try:
        user_key(user_id)
    except ValueError as error:
        raise InvalidRequest(param, str(error)) from None


def _moment(time_us: int) -> str | None:
    """Returns the time in RFC 3339; None for a position, which is not a timestamp."""
    if time_us < MIN_TIME_US:
        return None
    moment = EPOCH + datetime.timedelta(microseconds=time_us)
    return moment.isoformat().replace("+00:00", "Z")
