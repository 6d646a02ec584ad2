"""Histories: the latest events of each user, how they change, and the base class of the stores.

A stored value is a header and one fixed-size record per event, oldest first:

    "RH"  version u8  dtype u8  count u32  checksum 8 bytes  |  count x EVENT_DTYPE

The checksum is the first 8 bytes of a SHA-1 over everything else. It detects damage and is not
meant for security. SHA-1 is the one digest that a Redis script computes at C speed, so that
appending and checking take a single round trip.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import numpy as np

from recserve.bounds import MAX_ID_LENGTH, MAX_TIME_US, MAX_USER_ID_BYTES, MAX_VALUE, MIN_TIME_US
from recserve.features.history.type_names import MAX_EVENT_TYPES

EVENT_DTYPE = np.dtype(
    [
        ("item_key", "<u8"),
        ("event_key", "<u8"),
        ("time_us", "<i8"),
        ("value", "<f4"),
        ("type", "u1"),
    ]
)
DEFAULT_CAP = 1024
MAX_CAP = 65_536
HEADER = struct.Struct("<2sBBI8s")
MAGIC, VERSION, DTYPE_CODE = b"RH", 1, 1
MAX_MARK_BYTES = 64
MARK_PARTS = MAX_MARK_BYTES // 8


class StoreUnavailable(ConnectionError):
    """The store did not answer, rejected the call, or is full."""


class ListingUnsupported(RuntimeError):
    """The store cannot list its users."""


class CorruptHistory(ValueError):
    """A user's stored value is damaged. It is neither used nor overwritten; `delete` removes it."""


Stored = np.ndarray | CorruptHistory | StoreUnavailable


@dataclass(frozen=True)
class StoredEvent:
    """One event in a history store.

    Attributes:
        item_key: Key of the item, from `catalog.item_key`.
        time_us: Microseconds UTC.
        event_key: Key of the client's event id, from `event_key`. An event whose key is already in
            the stored history is a duplicate.
        type: Number of the event type. The first ones are those of `type_names.EVENT_TYPES`.
        value: Any finite 32-bit float.

    Raises:
        ValueError: If a field is out of range. The message names field, bound and value.
    """

    item_key: int
    time_us: int
    event_key: int
    type: int = 0
    value: float = 1.0

    def __post_init__(self) -> None:
        for name, given, high in (
            ("item_key", self.item_key, 2**64),
            ("event_key", self.event_key, 2**64),
            ("time_us", self.time_us, MAX_TIME_US),
            ("type", self.type, MAX_EVENT_TYPES),
        ):
            if not 0 <= given < high:
                raise ValueError(f"{name} is {given}; expected 0..{high - 1}")
        if not abs(self.value) <= MAX_VALUE:
            raise ValueError(f"value is {self.value}; expected a finite 32-bit float")


@dataclass(frozen=True)
class Replacement:
    """Replaces the stored event that has the same event key.

    Attributes:
        event: The new event.
        keeps_time: True keeps time and position of the stored event and ignores the new time.
    """

    event: StoredEvent
    keeps_time: bool = False

    @property
    def event_key(self) -> int:
        """Key of the stored event."""
        return self.event.event_key


@dataclass(frozen=True)
class Removal:
    """Removes the stored event with a key. The key can be used again afterwards."""

    event_key: int


@dataclass(frozen=True)
class Expiry:
    """Removes the stored events with a timestamp before `before_us`."""

    before_us: int


Correction = Replacement | Removal | Expiry
Change = StoredEvent | Correction


@dataclass(frozen=True)
class Revised:
    """A history that was trimmed, or changed other than by adding events at its end.

    Attributes:
        before: EVENT_DTYPE array before the changes.
        after: EVENT_DTYPE array after the changes.
    """

    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class Applied:
    """Result of changes to a history.

    Attributes:
        taken: Whether each change was made. False means a duplicate event, a correction of an
            event that is not stored, or an expiry that found nothing.
        revised: None if events were only added at the end and nothing was trimmed.
    """

    taken: list[bool]
    revised: Revised | None = None


@dataclass(frozen=True)
class StoredUsers:
    """A page of users with stored events.

    Attributes:
        ids: User ids. Their order is the store's, and an id may come twice.
        next: Cursor of the next page; None after the last one.
    """

    ids: list[str]
    next: str | None


@dataclass(frozen=True)
class StoreOptions:
    """Options of a history store. A store ignores options that it does not need.

    Attributes:
        cap: Events per user. A history longer than twice the cap is trimmed to the cap.
        timeout_s: Time limit of a network call.
        map_size_bytes: Largest size of the store's file.
        ttl_s: Age at which `open_store` deletes an event; None keeps events forever. It applies to
            every store.
        read_timeout_s: Time that a request waits for a history in a store that waits for a
            network; None waits for the store. `open_store` sees to it.
    """

    cap: int = DEFAULT_CAP
    timeout_s: float = 0.25
    map_size_bytes: int = 8 << 30
    ttl_s: float | None = None
    read_timeout_s: float | None = None


class HistoryStore(ABC):
    """Stores the histories of all users.

    A history is a read-only EVENT_DTYPE array, oldest first, of at most `2 * cap` events. All
    methods are thread-safe. They raise ValueError for a user id that is empty or longer than 480
    bytes, and StoreUnavailable if the store fails. A store derives from this class and is
    registered in stores.py.

    Attributes:
        blocks: Whether a read may wait for a network.
        ttl_s: Age at which events are deleted; None keeps them forever.
    """

    blocks: bool = True
    ttl_s: float | None = None

    @classmethod
    @abstractmethod
    def open(cls, url: str, options: StoreOptions) -> HistoryStore:
        """Returns the store of a URL whose scheme is registered for this class.

        Raises:
            StoreUnavailable: If the store cannot be opened.
        """

    def get(self, user_id: str) -> np.ndarray:
        """Returns a user's events; no events for an unknown user. Raises CorruptHistory."""
        (found,) = self.get_many([user_id])
        if isinstance(found, Exception):
            raise found
        return found

    def read(self, user_id: str) -> np.ndarray:
        """As `get`, for a request, which may not wait as long as the store takes."""
        return self.get(user_id)

    def server(self, user_id: str) -> str:
        """Returns the name of the server that has a user's history, where there are several."""
        return ""

    @abstractmethod
    def get_many(self, user_ids: Sequence[str]) -> Sequence[Stored]:
        """Returns the events of each user in one round trip.

        A damaged value is returned as a CorruptHistory in its place. So is StoreUnavailable for the
        users of a server that fails, unless all fail.
        """

    def append(self, user_id: str, changes: Sequence[Change]) -> list[bool]:
        """Inserts events by time and corrects stored events.

        The changes are durable, on disk or in the server, when the call returns.

        Args:
            user_id: User whose history changes.
            changes: Changes in the order in which they are made.

        Returns:
            Whether each change was made.

        Raises:
            CorruptHistory: If the stored value is damaged. Nothing is changed then.
        """
        applied = self.append_many({user_id: changes})[user_id]
        if isinstance(applied, CorruptHistory):
            raise applied
        return applied.taken

    @abstractmethod
    def append_many(
        self, changes: Mapping[str, Sequence[Change]]
    ) -> dict[str, Applied | CorruptHistory]:
        """Does `append` for several users in one round trip.

        The changes of one user are made atomically, in the given order. A damaged value is returned
        as a CorruptHistory in its place.
        """

    @abstractmethod
    def delete(self, user_id: str) -> bool:
        """Deletes a user's history, damaged or not. Returns whether there was one."""

    def users(self, prefix: str, limit: int, after: str | None) -> StoredUsers:
        """Returns a page of users. The work of a call is bounded, so a page may be short.

        Args:
            prefix: First characters of the ids.
            limit: Most users of the page.
            after: Cursor of an earlier page; None starts at the beginning.

        Raises:
            ListingUnsupported: If the store cannot list its users.
            ValueError: If the cursor is not one of this store.
        """
        raise ListingUnsupported("this history store cannot list its users")

    def marks(self, kind: str) -> list[str]:
        """Returns the service's own marks of a kind, in the order in which they were added.

        Marks are short texts that all servers of a store share, such as the names of event types.
        By default they are the history of a pseudo-user, eight events for each of them. A store
        that has a place of its own for them overrides this method and the next one.

        Args:
            kind: A name of lower-case letters and `-`.

        Raises:
            CorruptHistory: If the marks are damaged.
        """
        return unpack_marks(self.get(mark_id(f"marks-{kind}")), kind)

    def add_marks(self, kind: str, first: int, marks: Sequence[str]) -> None:
        """Adds marks behind the first ones of a kind, durably, unless there are more by now.

        The caller reads them afterwards: another server may have added some at the same time.

        Args:
            kind: As in `marks`.
            first: Number of marks that the caller has read.
            marks: Texts of at most MAX_MARK_BYTES.
        """
        if changes := pack_marks(first, marks):
            self.append(mark_id(f"marks-{kind}"), changes)

    @abstractmethod
    def close(self) -> None:
        """Releases the store."""


@dataclass(frozen=True)
class Merged:
    """A history after changes.

    Attributes:
        history: EVENT_DTYPE array.
        applied: Which changes were made.
    """

    history: np.ndarray
    applied: Applied


def event_key(event_id: str) -> int:
    """Returns the unsigned 64-bit key of a client's event id."""
    return int.from_bytes(blake2b(event_id.encode(), digest_size=8).digest(), "little")


def user_key(user_id: str) -> bytes:
    """Returns a user id as bytes. Raises ValueError if it is empty, too long or invalid text."""
    try:
        key = user_id.encode()
    except UnicodeEncodeError as error:
        raise ValueError("user id is not valid text") from error
    if not 1 <= len(key) <= MAX_USER_ID_BYTES:
        raise ValueError(f"user id has {len(key)} bytes; expected 1..{MAX_USER_ID_BYTES}")
    return key


def mark_id(name: str) -> str:
    """Returns the id of a pseudo-user whose history has marks of the service.

    It is longer than any id that a route accepts, so no client can use it.
    """
    return f"recserve:{name}:".ljust(MAX_ID_LENGTH + 44, ".")


def pack_marks(first: int, marks: Sequence[str]) -> list[StoredEvent]:
    """Returns marks as events, eight with 8 bytes of text each.

    The event keys are `8 * number + i`, and the value is the length in bytes. A store skips events
    whose key it has, so of two servers that give one number away at once only one succeeds.
    """
    found = []
    for number, mark in enumerate(marks, first):
        text = mark.encode()
        parts = np.frombuffer(text.ljust(MAX_MARK_BYTES, b"\0"), "<u8").tolist()
        found += [
            StoredEvent(part, 0, MARK_PARTS * number + i, value=len(text))
            for i, part in enumerate(parts)
        ]
    return found


def unpack_marks(events: np.ndarray, kind: str, first: int = 0) -> list[str]:
    """Returns what `pack_marks` packed from a number on. Raises CorruptHistory."""
    rows = np.sort(events, order="event_key")
    begin = MARK_PARTS * first
    expected = np.arange(begin, begin + rows.size)
    if rows.size % MARK_PARTS or (rows["event_key"] != expected).any():
        raise CorruptHistory(f"the marks {kind} in the history store are damaged")
    texts = rows["item_key"].astype("<u8").tobytes()
    sizes = rows["value"][::MARK_PARTS].astype(int).tolist()
    begins = range(0, len(texts), MAX_MARK_BYTES)
    try:
        return [texts[b : b + size].decode() for b, size in zip(begins, sizes, strict=True)]
    except UnicodeDecodeError as error:
        raise CorruptHistory(f"the marks {kind} in the history store are damaged") from error


def records(events: Sequence[StoredEvent]) -> np.ndarray:
    """Returns events as an EVENT_DTYPE array, in the given order."""
    rows = [(e.item_key, e.event_key, e.time_us, e.value, e.type) for e in events]
    return np.array(rows, dtype=EVENT_DTYPE)


def pack(history: np.ndarray) -> bytes:
    """Converts an EVENT_DTYPE array to stored bytes."""
    head = HEADER.pack(MAGIC, VERSION, DTYPE_CODE, len(history), b"")[:8]
    body = history.tobytes()
    return head + _checksum(head, body) + body


def unpack(data: bytes) -> np.ndarray:
    """Returns a view of stored bytes as an EVENT_DTYPE array.

    Raises:
        CorruptHistory: If the bytes are damaged.
    """
    if len(data) < HEADER.size:
        raise CorruptHistory(f"stored history has {len(data)} bytes; the header alone has 16")
    magic, version, dtype_code, count, checksum = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptHistory(f"stored history begins with {magic!r}; expected {MAGIC!r}")
    if (version, dtype_code) != (VERSION, DTYPE_CODE):
        raise CorruptHistory(
            f"stored history has version {version}.{dtype_code} of its format; this recserve reads "
            f"{VERSION}.{DTYPE_CODE}. Another version of recserve wrote it: use that one"
        )
    body = memoryview(data)[HEADER.size :]
    if len(body) != count * EVENT_DTYPE.itemsize:
        raise CorruptHistory(f"stored history declares {count} events but has {len(body)} bytes")
    if _checksum(data[:8], body) != checksum:
        raise CorruptHistory("stored history does not match its checksum")
    return np.frombuffer(body, dtype=EVENT_DTYPE)


def read_stored(value: bytes | None) -> np.ndarray | CorruptHistory:
    """Decodes a store's value; None is an empty history, and damage is returned, not raised."""
    if value is None:
        return np.frombuffer(b"", dtype=EVENT_DTYPE)
    try:
        return unpack(value)
    except CorruptHistory as error:
        return error


def _checksum(head: bytes, body: bytes | memoryview) -> bytes:
    digest = hashlib.sha1(head, usedforsecurity=False)
    digest.update(body)
    return digest.digest()[:8]


def merge(history: np.ndarray, changes: Sequence[Change], cap: int) -> Merged:
    """Makes changes in the given order, then trims a history of over `2 * cap` events to `cap`.

    A new event is inserted by time, after events of the same time. An event whose key is already
    stored is skipped. A replacement with another time is moved likewise; any other replacement
    keeps its position.

    Args:
        history: EVENT_DTYPE array, oldest first.
        changes: Changes in the order in which they are made.
        cap: Events per user.
    """
    after = history
    taken: list[bool] = []
    for run in runs(changes):
        done = _add_events(after, run) if isinstance(run, list) else _apply_correction(after, run)
        after = done.history
        taken += done.applied.taken
    trimmed = after[-cap:] if len(after) > 2 * cap else after
    revised = None if _begins_with(trimmed, history) else Revised(history, trimmed)
    return Merged(trimmed, Applied(taken, revised))


def runs(changes: Sequence[Change]) -> Iterator[list[StoredEvent] | Correction]:
    """Yields changes in order, with consecutive new events grouped as one list."""
    for are_new, run in groupby(changes, lambda change: isinstance(change, StoredEvent)):
        if are_new:
            yield [change for change in run if isinstance(change, StoredEvent)]
        else:
            yield from (change for change in run if not isinstance(change, StoredEvent))


def _add_events(history: np.ndarray, events: Sequence[StoredEvent]) -> Merged:
    """Inserts new events by time."""
    new = records(events)
    known = set(history["event_key"].tolist())
    accepted = []
    for key in new["event_key"].tolist():
        accepted.append(key not in known)
        known.add(key)
    fresh = new[accepted]
    if fresh.size:
        fresh = fresh[np.argsort(fresh["time_us"], kind="stable")]
        late = history.size > 0 and fresh["time_us"][0] < history["time_us"][-1]
        history = np.concatenate([history, fresh])
        if late:
            history = history[np.argsort(history["time_us"], kind="stable")]
    return Merged(history, Applied(accepted))


def without_expired(history: np.ndarray, before_us: int) -> np.ndarray:
    """Returns a history without the timestamps before `before_us`; positions have no age."""
    dated, kept = np.searchsorted(history["time_us"], [MIN_TIME_US, before_us])
    if kept <= dated:
        return history
    return np.concatenate([history[:dated], history[kept:]]) if dated else history[kept:]


def _apply_correction(history: np.ndarray, change: Correction) -> Merged:
    """Replaces or removes one event, or removes the events that have expired."""
    if isinstance(change, Expiry):
        rest = without_expired(history, change.before_us)
        return Merged(rest, Applied([rest.size < history.size]))
    found = np.flatnonzero(history["event_key"] == np.uint64(change.event_key))
    if not found.size:
        return Merged(history, Applied([False]))
    place = int(found[0])
    rest = np.delete(history, place)
    if isinstance(change, Removal):
        return Merged(rest, Applied([True]))
    new, time_us = records([change.event]), history["time_us"][place]
    if change.keeps_time:
        new["time_us"] = time_us
    elif change.event.time_us != time_us:
        # After events of the same time.
        place = int(np.searchsorted(rest["time_us"], change.event.time_us, side="right"))
    return Merged(np.concatenate([rest[:place], new, rest[place:]]), Applied([True]))


def _begins_with(history: np.ndarray, beginning: np.ndarray) -> bool:
    """Whether a history starts with exactly these events."""
    return history[: len(beginning)].tobytes() == beginning.tobytes()
