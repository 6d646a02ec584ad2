"""The histories of users: requests read them, events change them, and prefix caches follow.

POST /v1/events -> Histories.add -> EventChanges: checks every event
                                 -> HistoryStore.append_many
                                 -> Prewarm.forget, Prewarm.warm
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from recserve.bounds import MAX_ID_LENGTH, MIN_TIME_US, format_time
from recserve.bundle.bundle import EVENTS, Bundle
from recserve.core.client import LOCAL, Client
from recserve.engine.engine import Engine
from recserve.features.catalog.catalog import item_key
from recserve.features.history.history import (
    Applied,
    Change,
    CorruptHistory,
    HistoryStore,
    Removal,
    Replacement,
    Stored,
    StoredEvent,
    StoreUnavailable,
    event_key,
    mark_id,
    user_key,
)
from recserve.features.history.type_names import EVENT_TYPES
from recserve.features.tables.events import DAY_US
from recserve.features.tables.rfc3339 import parse_event_time
from recserve.schemas.browse import UserPage, UsersQuery
from recserve.schemas.events import (
    REMOVE,
    REPLACE,
    EventInput,
    EventsRequest,
    EventsResponse,
    EventTypesResponse,
    HistoryEvent,
    HistoryResponse,
)
from recserve.schemas.items import InvalidRequest, MissingField, Rejection, UserRef
from recserve.service.event_log import EventLogWriter
from recserve.service.event_types import EventTypes
from recserve.service.history import (
    EMPTY_HISTORY,
    EPOCH,
    History,
    Revision,
    known_events,
    wanted_events,
)
from recserve.service.live_catalog import LiveCatalog
from recserve.service.prewarm import Prewarm
from recserve.service.shown import ShownItems
from recserve.service.snapshot import Snapshot

log = logging.getLogger(__name__)

IMPORTS = "imports"  # marks of the imports that are done
IMPORT_MARKER = mark_id("imported")  # its history had them in earlier versions
USERS_PER_WRITE = 2000


class Histories:
    """Reads, adds, lists and deletes events, and keeps the prefix caches consistent with them.

    Attributes:
        store: The store.
        types: Event types of the store.
        engine: Engine of the models, whose prefix caches hold histories.
        catalog: The live catalogue, which maps items to rows.
        prewarm: Precomputes and drops the prefixes of users.
        shown: Records of what users were shown.
        default_value: Value of an event that does not have one.
        owns_store: True if `close` closes the store; False while another service owns it.
        event_log: Log of what the store has taken; None without one.
        successor: Engine of the service that replaces this one; it shares the store. Requests that
            are still in flight here also clear its caches. None before a replacement.
    """

    def __init__(
        self,
        store: HistoryStore,
        types: EventTypes,
        engine: Engine,
        catalog: LiveCatalog,
        prewarm: Prewarm,
        shown: ShownItems,
        default_value: float = 1.0,
        owns_store: bool = True,
    ) -> None:
        self.store, self.types = store, types
        self.engine, self.catalog, self.prewarm = engine, catalog, prewarm
        self.shown = shown
        self.default_value = default_value
        self.owns_store = owns_store
        self.event_log: EventLogWriter | None = None
        self.successor: Engine | None = None

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
            return wanted_events(self.store.read(user.id), snapshot.items, self.types)
        except StoreUnavailable as error:
            log.warning("the history store failed: %s", error)
            return replace(EMPTY_HISTORY, degraded=("history_unavailable",))
        except CorruptHistory as error:
            log.error("a stored history is damaged: %s", error)
            return replace(EMPTY_HISTORY, degraded=("history_damaged",))

    def add(
        self, body: EventsRequest, popular: bool = True, client: Client = LOCAL
    ) -> EventsResponse:
        """Stores events and corrections, and drops the cached prefixes that they invalidate.

        An invalid event does not affect the others. With `warm`, the engine precomputes the new
        prefixes of these users.

        Args:
            body: The events.
            popular: Whether new events count for the list `popular`, and are logged.
            client: Who sends them.

        Raises:
            StoreUnavailable: If the store does not answer.
        """
        snapshot = self._snapshot
        incoming = EventChanges(snapshot, self.types, self.default_value, self.store.ttl_s)
        for index, event in enumerate(body.events):
            incoming.take(index, event)
        revisions: dict[str, Revision] = {}
        stored = self.store.append_many({u: [c for _, c in cs] for u, cs in incoming.users.items()})
        for user_id, applied in stored.items():
            incoming.count(user_id, applied)
            if isinstance(applied, Applied) and (revised := applied.revised) is not None:
                revisions[user_id] = Revision(
                    wanted_events(revised.before, snapshot.items, self.types),
                    wanted_events(revised.after, snapshot.items, self.types),
                )
        if popular and self.event_log is not None:
            self.event_log.take(body.events, incoming.users, stored, incoming.now_us)
        if popular:
            weights = incoming.new_weights() if self.types.weights.entries else None
            self.catalog.count_events(incoming.new_keys, incoming.new_times, weights)
        self.prewarm.forget(revisions, self._snapshot)
        if self.successor is not None and revisions:
            self.successor.forget_all()
        answer = incoming.answer()
        if not body.warm:
            return answer
        refused = {rejection.index for rejection in answer.rejected}
        users = dict.fromkeys(e.user_id for i, e in enumerate(body.events) if i not in refused)
        return structs.replace(answer, warmed=self._warm(users, client))

    def list_events(self, user_id: str) -> HistoryResponse:
        """Returns a user's events with item ids, type names and timestamps.

        Raises:
            InvalidRequest: If the id is empty or too long, or if no store can hold it.
            StoreUnavailable: If the store does not answer.
            CorruptHistory: If the stored events are damaged.
        """
        _check_user("user_id", user_id)
        items = self._snapshot.items
        history = known_events(self.store.get(user_id), items)
        names = self.types.names(history.types)
        columns = (history.rows.tolist(), history.times.tolist(), names)
        events = [
            HistoryEvent(item_id=items.item_id(row), type=name, timestamp=_moment(time_us))
            for row, time_us, name in zip(*columns, strict=True)
        ]
        unknown = history.num_events - len(events)
        return HistoryResponse(user_id=user_id, events=events, unknown_items=unknown)

    def list_users(self, query: UsersQuery) -> UserPage:
        """Returns a page of users with stored events.

        Raises:
            InvalidRequest: If the cursor is not one of the history store.
            ListingUnsupported: If the history store cannot list its users.
            StoreUnavailable: If the history store does not answer.
        """
        try:
            found = self.store.users(query.prefix, query.limit, query.after)
            ids = _without_marks(found.ids)
            marks = len(found.ids) - len(ids)
            while marks and found.next is not None:  # others take the places of the marks
                found = self.store.users(query.prefix, marks, found.next)
                more = _without_marks(found.ids)
                ids, marks = ids + more, len(found.ids) - len(more)
        except ValueError as error:
            raise InvalidRequest("after", str(error)) from None
        return UserPage(users=ids, next=found.next)

    def list_types(self) -> EventTypesResponse:
        """Returns the names of the event types that events may have, and their kinds."""
        known, kinds = self.types.known, self.types.kinds
        return EventTypesResponse(
            event_types=list(known),
            kinds={name: kinds.kind(name) for name in known},
            negative_below=kinds.below(),
        )

    def delete(self, user_id: str) -> None:
        """Removes a user from the store, damaged or not, and from the caches.

        What the user was shown is removed too.

        Raises:
            InvalidRequest: If the id is empty or too long, or if no store can hold it.
            StoreUnavailable: If the store does not answer.
        """
        _check_user("user_id", user_id)
        items = self._snapshot.items
        try:
            stored = self.store.get(user_id)
            every, history = known_events(stored, items), wanted_events(stored, items, self.types)
        except CorruptHistory:
            every = history = EMPTY_HISTORY
        self.shown.delete(user_id)
        self.store.delete(user_id)
        # An item that was hidden was in earlier prefixes, which the present one does not begin.
        if history.rows.size < every.rows.size or self.catalog.has_changed_rows(every):
            self.engine.forget_all()
        self.prewarm.forget({user_id: Revision(history, None)}, self._snapshot)
        if self.successor is not None:
            self.successor.forget_all()

    def import_events(self, bundle: Bundle, only_new_users: bool = False) -> None:
        """Copies the events of a bundle into the store, once per store and events file.

        The store records the import, so that a deleted user stays deleted. Events that the store
        would delete for their age are left out.

        Args:
            bundle: The bundle. The store's event types get those of its events.
            only_new_users: Copies nothing for users who have stored events. A bundle that was built
                from a log of this server's events would otherwise add each of them a second time.
        """
        entry = bundle.manifest.files.get(EVENTS)
        if entry is None:
            return
        store, types = self.store, self.types
        mark = entry.sha256[:16]
        if mark in _read_imports(store):
            return
        events, catalog = bundle.all_events(), bundle.catalog()
        bundle.check_unchanged()
        types.add(events.type_names)
        keys = catalog.keys[events.item_rows].tolist()
        kinds = types.numbers(events.type_names)[events.types].tolist()
        times, values = events.times.tolist(), events.values.tolist()
        oldest_us = 0 if store.ttl_s is None else time.time_ns() // 1000 - int(store.ttl_s * 1e6)
        started, num_imported = time.monotonic(), 0
        for first in range(0, events.num_users, USERS_PER_WRITE):
            part: Sequence[int] = range(first, min(first + USERS_PER_WRITE, events.num_users))
            gathered = {}
            if only_new_users:
                stored = store.get_many([events.user_ids[user] for user in part])
                part = [u for u, had in zip(part, stored, strict=True) if not _has_events(had)]
            for user in part:
                start, stop = int(events.offsets[user]), int(events.offsets[user + 1])
                user_id = events.user_ids[user]
                base = _user_base(user_id) - start
                try:
                    gathered[user_id] = [
                        StoredEvent(keys[i], times[i], (base + i) % 2**64, kinds[i], values[i])
                        for i in range(start, stop)
                        if times[i] >= oldest_us or times[i] < MIN_TIME_US
                    ]
                except ValueError as error:
                    raise ValueError(
                        f"{bundle.path(EVENTS)}: an event of user {user_id!r} cannot be stored: "
                        f"{error}"
                    ) from error
                num_imported += len(gathered[user_id])
            store.append_many(gathered)
        while mark not in (done := _read_imports(store)):
            store.add_marks(IMPORTS, len(done), [mark])
        log.info(
            "imported %d of %d events of %d users from the bundle in %.1f s",
            num_imported,
            events.num_events,
            events.num_users,
            time.monotonic() - started,
        )

    def close(self) -> None:
        """Closes the store, unless another service owns it or a call of the store hangs."""
        if self.owns_store and self.shown.close():
            self.store.close()

    @property
    def _snapshot(self) -> Snapshot:
        return self.catalog.current

    def _warm(self, user_ids: Iterable[str], client: Client) -> int:
        """Precomputes the prefixes of users and returns how many the engine has taken."""
        snapshot = self._snapshot

        def histories() -> Iterator[tuple[str, History]]:  # read only until the queue is full
            for user_id in user_ids:
                yield user_id, self.read(UserRef(id=user_id), None, snapshot)

        return self.prewarm.warm(histories(), snapshot, client)

    def _inline(self, item_ids: Sequence[str], snapshot: Snapshot) -> History:
        found = snapshot.history_rows(item_ids)
        rows = found[found >= 0]
        zeros = np.zeros(rows.size, dtype=np.int64)
        values = np.full(rows.size, self.default_value, dtype=np.float32)
        degraded = ("unknown_history_items",) if rows.size < len(found) else ()
        return History(rows, zeros, zeros, values, len(found), degraded)


class EventChanges:
    """The events of one request: each is validated on its own, and what the store did is counted.

    Attributes:
        rows: Maps item ids to rows, hidden items to -1.
        types: Known event types.
        default_value: Value of an event that does not have one.
        ttl_s: Age at which the store deletes events; None for never.
        now_us: Time of the request in microseconds since 1970.
        users: Position in the request and change of each valid event, by user id.
        rejected: Events that were not stored, with the reason.
        new_keys: Item key of each new positive event.
        new_times: Time of each new positive event in microseconds since 1970.
        accepted: Number of new events.
        duplicates: Number of events that were stored before.
        corrected: Number of corrections that took effect.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        types: EventTypes,
        default_value: float,
        ttl_s: float | None = None,
    ) -> None:
        self.rows, self.types = snapshot.rows, types
        self.default_value, self.ttl_s = default_value, ttl_s
        self.now_us = time.time_ns() // 1000
        self.users: dict[str, list[tuple[int, Change]]] = {}
        self.rejected: list[Rejection] = []
        self.new_keys: list[int] = []
        self.new_times: list[int] = []
        self.new_kinds: list[tuple[int, float]] = []
        self.accepted = self.duplicates = self.corrected = 0

    def take(self, index: int, event: EventInput) -> None:
        """Validates an event; an invalid one goes to `rejected`.

        Args:
            index: Position of the event in the request.
            event: The event.
        """
        try:
            change = self._change(event)
        except ValueError as error:
            self.rejected.append(Rejection(index=index, reason=str(error)))
        else:
            self.users.setdefault(event.user_id, []).append((index, change))

    def count(self, user_id: str, applied: Applied | CorruptHistory) -> None:
        """Counts what happened to the events of one user.

        Args:
            user_id: The user.
            applied: Result of the store, or the error if the stored history is damaged.
        """
        changes = self.users[user_id]
        if isinstance(applied, CorruptHistory):
            reason = "the stored history of this user is damaged; delete the user first"
            self.rejected += [Rejection(index=index, reason=reason) for index, _ in changes]
            return
        for (index, change), done in zip(changes, applied.taken, strict=True):
            if isinstance(change, StoredEvent):
                self.accepted += done
                self.duplicates += not done
                if done and self.types.is_positive(change.type, change.value):
                    self.new_keys.append(change.item_key)
                    self.new_times.append(change.time_us)
                    if self.types.weights.entries:
                        self.new_kinds.append((change.type, change.value))
            elif done:
                self.corrected += 1
            else:
                reason = "event_id: this user has no stored event with this id"
                self.rejected.append(Rejection(index=index, reason=reason))

    def new_weights(self) -> np.ndarray:
        """Returns [n] float32 weight of each new positive event."""
        pairs = np.array(self.new_kinds, np.float64).reshape(-1, 2)
        return self.types.weights_of(pairs[:, 0].astype(np.int64), pairs[:, 1])

    def answer(self) -> EventsResponse:
        """Returns the response; rejections are sorted by position in the request."""
        return EventsResponse(
            accepted=self.accepted,
            duplicates=self.duplicates,
            corrected=self.corrected,
            rejected=sorted(self.rejected, key=lambda rejection: rejection.index),
        )

    def _change(self, event: EventInput) -> Change:
        """Raises ValueError with a message for the client."""
        if len(event.user_id) > MAX_ID_LENGTH:
            raise ValueError(f"user_id: at most {MAX_ID_LENGTH} characters, got more")
        user_key(event.user_id)
        if event.event_id is not None and not 1 <= len(event.event_id) <= MAX_ID_LENGTH:
            raise ValueError(
                f"event_id: expected 1 to {MAX_ID_LENGTH} characters, got {len(event.event_id)}"
            )
        if event.correction is None:
            return self._make_event(event)
        if event.correction not in (REPLACE, REMOVE):
            value = f"{event.correction[:40]!r}"
            raise ValueError(f"correction: expected {REPLACE} or {REMOVE}, got {value}")
        if event.event_id is None:
            raise ValueError("event_id: is required with a correction")
        if event.correction == REMOVE:
            return Removal(event_key(event.event_id))
        return Replacement(self._make_event(event), keeps_time=event.timestamp is None)

    def _make_event(self, event: EventInput) -> StoredEvent:
        if event.item_id is None:
            raise ValueError(f"item_id: is required with correction {REPLACE}")
        if event.item_id not in self.rows:  # a hidden item is part of what a user did
            raise ValueError(f"unknown item {event.item_id[:80]!r}")
        kind = self.types.number(event.type) if event.type is not None else 0
        if event.value is None and kind in self.types.valued:
            below = self.types.below.get(kind)
            means = "has a weight by value" if below is None else f"is negative below {below:g}"
            raise ValueError(f"value: is required for type {event.type!r}, which {means}")
        time_us = self.now_us if event.timestamp is None else self._time_us(event.timestamp)
        value = self.default_value if event.value is None else event.value
        key = _key(event, time_us, event.type or EVENT_TYPES[0])
        return StoredEvent(item_key(event.item_id), time_us, key, kind, value)

    def _time_us(self, text: str) -> int:
        try:
            time_us = parse_event_time(text)
        except ValueError as error:
            raise ValueError(f"timestamp: {error}") from None
        if time_us < MIN_TIME_US:
            raise ValueError(f"timestamp: before 1970-01-13: {text[:60]!r}")
        if time_us > self.now_us + DAY_US:
            raise ValueError(f"timestamp: more than a day in the future: {text[:60]!r}")
        if self.ttl_s is not None and time_us < self.now_us - self.ttl_s * 1e6:
            raise ValueError(
                f"timestamp: older than {self.ttl_s:g} s, the age at which this server deletes "
                f"events: {text[:60]!r}"
            )
        return time_us


def _key(event: EventInput, time_us: int, kind: str) -> int:
    """Returns the key by which the store finds duplicates.

    The key comes from the event id if there is one, else from item, time and type, however the
    request writes them. An event without id and timestamp gets a random key, so it is never a
    duplicate.
    """
    if event.event_id is not None:
        return event_key(event.event_id)
    if event.timestamp is None:
        return secrets.randbits(64)
    return event_key(f"{event.item_id}\0{format_time(time_us)}\0{kind}")


def _check_user(param: str, user_id: str) -> None:
    if not 1 <= len(user_id) <= MAX_ID_LENGTH:
        raise InvalidRequest(param, f"expected 1 to {MAX_ID_LENGTH} characters, got {len(user_id)}")
    try:
        user_key(user_id)
    except ValueError as error:
        raise InvalidRequest(param, str(error)) from None


def _without_marks(user_ids: list[str]) -> list[str]:
    """Returns the ids that a request can name; longer ones are the service's own marks."""
    return [user_id for user_id in user_ids if len(user_id) <= MAX_ID_LENGTH]


def _read_imports(store: HistoryStore) -> list[str]:
    """Returns the marks of the imports that are done; moves those of earlier versions."""
    done = store.marks(IMPORTS)
    if not done and (old := store.get(IMPORT_MARKER)).size:
        store.add_marks(IMPORTS, 0, [f"{key:016x}" for key in old["event_key"].tolist()])
        done = store.marks(IMPORTS)
        store.delete(IMPORT_MARKER)
    return done


def _has_events(stored: Stored) -> bool:
    """Whether a user has events. Raises StoreUnavailable if nobody can say."""
    if isinstance(stored, StoreUnavailable):
        raise stored
    return isinstance(stored, CorruptHistory) or stored.size > 0


def _user_base(user_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(user_id.encode(), digest_size=8).digest(), "little")


def _moment(time_us: int) -> str | None:
    """Returns the time in RFC 3339; None for a position, which is not a timestamp."""
    if time_us < MIN_TIME_US:
        return None
    moment = EPOCH + datetime.timedelta(microseconds=time_us)
    return moment.isoformat().replace("+00:00", "Z")
