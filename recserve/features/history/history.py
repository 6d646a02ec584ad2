"""Histories: the newest events of a user, packed, behind one protocol for every store.

A value is a header and one fixed record per event, oldest first:

    "RH"  version u8  dtype u8  count u32  checksum 8 bytes  |  count x EVENT_DTYPE

The checksum is the head of a SHA-1 over everything else: not for secrecy, but because it is the
one digest that Redis computes at C speed inside a script, so that appending and checking stay one
round trip.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, Protocol

import numpy as np

EVENT_DTYPE = np.dtype(
    [
        ("item_key", "<u8"),
        ("event_key", "<u8"),
        ("time_us", "<i8"),
        ("value", "<f4"),
        ("type", "u1"),
    ]
)
EVENT_TYPES = (
    *("event", "view", "click", "cart", "purchase"),
    *("like", "dislike", "rating", "share", "save"),
    *("play", "complete", "skip", "hide"),
)
DEFAULT_CAP = 1024
MAX_CAP = 65_536
MAX_TIME_US = 2**53
MAX_USER_ID_BYTES = 480
MAX_VALUE = float(np.finfo(np.float32).max)
HEADER = struct.Struct("<2sBBI8s")
MAGIC, VERSION, DTYPE_CODE = b"RH", 1, 1


class StoreUnavailable(ConnectionError):
    """The store did not answer, refused to, or is full."""


class CorruptHistory(ValueError):
    """A user's stored value is damaged: neither used nor overwritten; `delete` clears it."""


@dataclass(frozen=True)
class StoredEvent:
    """One event as a store keeps it.

    item_key: `catalog.item_key` of the item. time_us: microseconds UTC. event_key: `event_key` of
    the client's event id; an event whose key is in the kept window is a duplicate. type: index
    into EVENT_TYPES.
    Raises ValueError naming the field, its bound and what came.
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
            ("type", self.type, len(EVENT_TYPES)),
        ):
            if not 0 <= given < high:
                raise ValueError(f"{name} is {given}; expected 0..{high - 1}")
        if not abs(self.value) <= MAX_VALUE:
            raise ValueError(f"value is {self.value}; expected a finite 32-bit float")


@dataclass(frozen=True)
class Replacement:
    """The stored event with the key of `event` becomes it.

    keeps_time: it stays at the time, and in the place, that it has; the event's own time is not
    read.
    """

    event: StoredEvent
    keeps_time: bool = False

    @property
    def event_key(self) -> int:
        """Of the stored event."""
        return self.event.event_key


@dataclass(frozen=True)
class Removal:
    """The stored event with this key goes; its key is then as good as never seen."""

    event_key: int


Correction = Replacement | Removal
Change = StoredEvent | Correction


@dataclass(frozen=True)
class Revised:
    """A history that events were put into, changed in or taken out of, not only added at its end.

    before, after: EVENT_DTYPE arrays.
    """

    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class Applied:
    """What became of changes. taken: per change, whether it was done; False for a duplicate event
    and for a correction of what is not stored. revised: None where events at its end are all that
    is new, and nothing was trimmed.
    """

    taken: list[bool]
    revised: Revised | None = None


@dataclass(frozen=True)
class StoreOptions:
    """Options of a history store; each store reads those that it has a use for.

    Attributes:
        cap: Events per user. A history is trimmed to it when it reaches twice that.
        timeout_s: Most time of a call over a network.
        map_size_bytes: Most bytes of a file.
    """

    cap: int = DEFAULT_CAP
    timeout_s: float = 0.25
    map_size_bytes: int = 8 << 30


class HistoryStore(Protocol):
    """Histories of all users: EVENT_DTYPE arrays, read-only, oldest first, at most `2 * cap` long.

    All methods are safe to call from several threads. They raise ValueError for a user id that is
    empty or longer than 480 bytes, and StoreUnavailable where the store fails. A store derives from
    this class and is registered in stores.py.

    Attributes:
        blocks: Whether a read may wait for a network.
    """

    blocks: ClassVar[bool] = True

    @classmethod
    def open(cls, url: str, options: StoreOptions) -> HistoryStore:
        """Returns the store of a URL whose scheme is registered for this class.

        Raises:
            StoreUnavailable: If the store cannot be opened.
        """
        ...

    def get(self, user_id: str) -> np.ndarray:
        """A user's events; none for an unknown user. Raises CorruptHistory."""
        (found,) = self.get_many([user_id])
        if isinstance(found, CorruptHistory):
            raise found
        return found

    def get_many(self, user_ids: Sequence[str]) -> list[np.ndarray | CorruptHistory]:
        """Events of each user, one round trip for all; a damaged value is reported in its place."""

    def append(self, user_id: str, changes: Sequence[Change]) -> list[bool]:
        """Add events in order of time, and correct what is stored; per change, whether it was done.

        What was done is on disk, or in the server, when this returns. Raises CorruptHistory.
        """
        applied = self.append_many({user_id: changes})[user_id]
        if isinstance(applied, CorruptHistory):
            raise applied
        return applied.taken

    def append_many(
        self, changes: Mapping[str, Sequence[Change]]
    ) -> dict[str, Applied | CorruptHistory]:
        """`append` for several users in one round trip; damage is reported in its place.

        A user's changes are made in the order given, all together: nobody reads or writes between.
        """

    def delete(self, user_id: str) -> bool:
        """Forget a user; whether anything was stored. Works on damaged values too."""

    def close(self) -> None:
        """Let go of the store."""


def event_key(event_id: str) -> int:
    """Unsigned 64-bit key of a client's event id."""
    return int.from_bytes(blake2b(event_id.encode(), digest_size=8).digest(), "little")


def event_type(name: str) -> int:
    """Index of a type's name. Raises ValueError listing the names there are."""
    if name not in EVENT_TYPES:
        raise ValueError(f"type is {name[:40]!r}; expected one of {', '.join(EVENT_TYPES)}")
    return EVENT_TYPES.index(name)


def user_key(user_id: str) -> bytes:
    """The user id as bytes. Raises ValueError if it is empty, too long or not valid text."""
    try:
        key = user_id.encode()
    except UnicodeEncodeError as error:
        raise ValueError("user id is not valid text") from error
    if not 1 <= len(key) <= MAX_USER_ID_BYTES:
        raise ValueError(f"user id has {len(key)} bytes; expected 1..{MAX_USER_ID_BYTES}")
    return key


def records(events: Sequence[StoredEvent]) -> np.ndarray:
    """Events as an EVENT_DTYPE array, in the given order."""
    rows = [(e.item_key, e.event_key, e.time_us, e.value, e.type) for e in events]
    return np.array(rows, dtype=EVENT_DTYPE)


def pack(history: np.ndarray) -> bytes:
    """EVENT_DTYPE array -> stored bytes."""
    head = HEADER.pack(MAGIC, VERSION, DTYPE_CODE, len(history), b"")[:8]
    body = history.tobytes()
    return head + _checksum(head, body) + body


def unpack(data: bytes) -> np.ndarray:
    """Stored bytes -> EVENT_DTYPE array, a view. Raises CorruptHistory if they are damaged."""
    if len(data) < HEADER.size:
        raise CorruptHistory(f"stored history has {len(data)} bytes; the header alone has 16")
    magic, version, dtype_code, count, checksum = HEADER.unpack_from(data)
    if (magic, version, dtype_code) != (MAGIC, VERSION, DTYPE_CODE):
        raise CorruptHistory(f"stored history is of format {magic!r} {version}.{dtype_code}")
    body = memoryview(data)[HEADER.size :]
    if len(body) != count * EVENT_DTYPE.itemsize:
        raise CorruptHistory(f"stored history names {count} events but has {len(body)} bytes")
    if _checksum(data[:8], body) != checksum:
        raise CorruptHistory("stored history does not match its checksum")
    return np.frombuffer(body, dtype=EVENT_DTYPE)


def read_stored(value: bytes | None) -> np.ndarray | CorruptHistory:
    """What a store holds for a user: events, none for None; damage is returned, not raised."""
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
