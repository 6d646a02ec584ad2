"""Validates the events of a request, and imports the events of a bundle into a store."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Sequence

import numpy as np

from recserve.bounds import MAX_ID_LENGTH, MIN_TIME_US
from recserve.bundle.bundle import EVENTS, Bundle
from recserve.features.catalog.catalog import item_key
from recserve.features.history.history import (
    Change,
    CorruptHistory,
    HistoryStore,
    Removal,
    Replacement,
    StoredEvent,
    event_key,
    mark_id,
    user_key,
)
from recserve.features.tables.rfc3339 import parse_event_time
from recserve.schemas.events import REMOVE, REPLACE, EventInput
from recserve.schemas.items import Rejection
from recserve.service.history.event_types import EventTypes
from recserve.service.snapshot import Snapshot

log = logging.getLogger(__name__)

DAY_US = 86_400_000_000
IMPORT_MARKER = mark_id("imported")  # its history records which imports are done
USERS_PER_WRITE = 2000


class EventChanges:
    """The events of one request; each is validated on its own.

    Attributes:
        rows: Maps item ids to rows, hidden items to -1.
        types: Known event types.
        default_value: Value of an event that does not have one.
        ttl_s: Age at which the store deletes events; None for never.
        now_us: Time of the request in microseconds since 1970.
        users: Position in the request and change of each valid event, by user id.
        rejected: Invalid events, with the reason.
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
            return self._stored(event)
        if event.correction not in (REPLACE, REMOVE):
            value = f"{event.correction[:40]!r}"
            raise ValueError(f"correction: expected {REPLACE} or {REMOVE}, got {value}")
        if event.event_id is None:
            raise ValueError("event_id: is required with a correction")
        if event.correction == REMOVE:
            return Removal(event_key(event.event_id))
        return Replacement(self._stored(event), keeps_time=event.timestamp is None)

    def _stored(self, event: EventInput) -> StoredEvent:
        if event.item_id is None:
            raise ValueError(f"item_id: is required with correction {REPLACE}")
        if event.item_id not in self.rows:  # a hidden item is part of what a user did
            raise ValueError(f"unknown item {event.item_id[:80]!r}")
        kind = self.types.number(event.type) if event.type is not None else 0
        time_us = self.now_us if event.timestamp is None else self._time_us(event.timestamp)
        value = self.default_value if event.value is None else event.value
        return StoredEvent(item_key(event.item_id), time_us, _key(event), kind, value)

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


def _key(event: EventInput) -> int:
    """Returns the key by which the store finds duplicates.

    The key comes from the event id if there is one, else from the content. An event without id and
    timestamp gets a random key, so it is never a duplicate.
    """
    if event.event_id is not None:
        return event_key(event.event_id)
    if event.timestamp is None:
        return secrets.randbits(64)
    return event_key(f"{event.item_id}\0{event.timestamp}\0{event.type}")


def import_events(
    store: HistoryStore, bundle: Bundle, types: EventTypes, only_new_users: bool = False
) -> None:
    """Copies the events of a bundle into a store, once per store and events file.

    The store records the import, so that a deleted user stays deleted. Events that the store would
    delete for their age are left out.

    Args:
        store: The store.
        bundle: The bundle.
        types: Event types of the store, which get those of the events.
        only_new_users: Copies nothing for users who have stored events. A bundle that was built
            from a log of this server's events would otherwise add each of them a second time.
    """
    entry = bundle.manifest.files.get(EVENTS)
    if entry is None:
        return
    mark = int(entry.sha256[:16], 16)
    if mark in store.get(IMPORT_MARKER)["event_key"]:
        return
    events, catalog = bundle.events(), bundle.catalog()
    bundle.check_unchanged()
    types.add_of_bundle(events.type_names)
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
            base = _user_base(events.user_ids[user])
            try:
                gathered[events.user_ids[user]] = [
                    StoredEvent(keys[i], times[i], (base + i - start) % 2**64, kinds[i], values[i])
                    for i in range(start, stop)
                    if times[i] >= oldest_us or times[i] < MIN_TIME_US
                ]
            except ValueError as error:
                raise ValueError(
                    f"{bundle.path(EVENTS)}: an event of user {events.user_ids[user]!r} cannot be "
                    f"stored: {error}"
                ) from error
            num_imported += len(gathered[events.user_ids[user]])
        store.append_many(gathered)
    store.append(IMPORT_MARKER, [StoredEvent(mark, 0, mark)])
    log.info(
        "imported %d of %d events of %d users from the bundle in %.1f s",
        num_imported,
        events.num_events,
        events.num_users,
        time.monotonic() - started,
    )


def _has_events(stored: np.ndarray | CorruptHistory) -> bool:
    return isinstance(stored, CorruptHistory) or stored.size > 0


def _user_base(user_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(user_id.encode(), digest_size=8).digest(), "little")
