"""Stores histories in LMDB, an embedded database. Acknowledged appends survive a crash.

A write transaction syncs to disk before `append` returns. Readers never wait for it.

A key is a user's id in UTF-8. The marks of the service have keys behind all ids: they begin with a
byte that UTF-8 does not have. Their value is a JSON list of texts.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import numpy as np

from recserve.bounds import MAX_USER_ID_BYTES
from recserve.features.history.history import (
    DEFAULT_CAP,
    Applied,
    Change,
    CorruptHistory,
    HistoryStore,
    StoredUsers,
    StoreOptions,
    StoreUnavailable,
    merge,
    pack,
    read_stored,
    user_key,
)

MAX_READERS = 512
# LMDB gives each reader a slot. A process that is killed leaves its slots in use until another one
# frees them: every CHECK_S seconds in an open store, for which opening it waits WAIT_S.
CHECK_S, WAIT_S = 1.0, 3.0
DATA = "data.mdb"
# Reads every page of a store.
READ_ALL = """
import lmdb, os, sys
store = lmdb.open(sys.argv[1], readonly=True, create=False, max_readers=int(sys.argv[2]))
store.copyfd(os.open(os.devnull, os.O_WRONLY), compact=True)
"""
MARKS = b"\xff"  # first byte of the keys of marks
ALL_READ = (
    f"running processes use all {MAX_READERS} places of readers; end one that has the store open"
)


class LmdbStore(HistoryStore):
    """A history store in a local folder, which a process may open only once.

    Attributes:
        path: Folder of the store.
        cap: Events per user.

    Raises:
        StoreUnavailable: If the folder cannot be opened.
    """

    blocks = False

    @classmethod
    def open(cls, url: str, options: StoreOptions) -> LmdbStore:
        """Returns the store of `lmdb:PATH`."""
        path = url.partition(":")[2]
        return cls(path, cap=options.cap, map_size_bytes=options.map_size_bytes)

    def __init__(
        self, path: str | Path, *, cap: int = DEFAULT_CAP, map_size_bytes: int = 8 << 30
    ) -> None:
        """Opens or creates the store.

        Args:
            path: Folder of the store.
            cap: Events per user.
            map_size_bytes: Largest size of the file. The file is sparse and uses only what it
                holds.
        """
        self.path = Path(path)
        self.cap = cap
        with self._failures():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._environment = _open(self.path, map_size=map_size_bytes)
        self._closed, self._closing = threading.Event(), threading.Lock()
        free = threading.Thread(
            target=_free_slots, args=(weakref.ref(self), self._closed), name="lmdb", daemon=True
        )
        free.start()

    def get_many(self, user_ids: Sequence[str]) -> list[np.ndarray | CorruptHistory]:
        """Returns the events of each user, all from one snapshot.

        A damaged value is returned as a CorruptHistory in its place.
        """
        keys = [user_key(user_id) for user_id in user_ids]
        with self._failures(), _begin(self._environment) as transaction:
            values = [transaction.get(key) for key in keys]
        return [read_stored(value) for value in values]

    def append_many(
        self, changes: Mapping[str, Sequence[Change]]
    ) -> dict[str, Applied | CorruptHistory]:
        """Changes the histories of several users in one transaction, synced to disk once."""
        keys = {user_id: user_key(user_id) for user_id in changes}
        answers: dict[str, Applied | CorruptHistory] = {}
        with self._failures(), self._environment.begin(write=True) as transaction:
            for user_id, key in keys.items():
                history = read_stored(transaction.get(key))
                if isinstance(history, CorruptHistory):
                    answers[user_id] = history
                    continue
                merged = merge(history, changes[user_id], self.cap)
                answers[user_id] = merged.applied
                if any(merged.applied.taken) and merged.history.size:
                    transaction.put(key, pack(merged.history))
                elif any(merged.applied.taken):
                    transaction.delete(key)
        return answers

    def delete(self, user_id: str) -> bool:
        """Deletes a user's history. Returns whether there was one."""
        key = user_key(user_id)
        with self._failures(), self._environment.begin(write=True) as transaction:
            return bool(transaction.delete(key))

    def users(self, prefix: str, limit: int, after: str | None) -> StoredUsers:
        """Returns a page of users in byte order of their ids; the cursor is the last id."""
        first = prefix.encode()
        if len(first) > MAX_USER_ID_BYTES:
            return StoredUsers([], None)
        start = first if after is None else max(first, user_key(after) + b"\0")
        found: list[bytes] = []
        with self._failures(), _begin(self._environment) as reading, reading.cursor() as cursor:
            there = cursor.set_range(start) if start else cursor.first()
            while there and len(found) <= limit and cursor.key().startswith(first):
                if cursor.key().startswith(MARKS):
                    break
                found.append(bytes(cursor.key()))
                there = cursor.next()
        ids = [key.decode() for key in found[:limit]]
        return StoredUsers(ids, ids[-1] if len(found) > limit else None)

    def marks(self, kind: str) -> list[str]:
        """Returns the marks of a kind."""
        with self._failures(), _begin(self._environment) as transaction:
            return _read_marks(transaction, kind)

    def add_marks(self, kind: str, first: int, marks: Sequence[str]) -> None:
        """Adds marks in one transaction, unless there are more than the first ones."""
        with self._failures(), self._environment.begin(write=True) as transaction:
            found = _read_marks(transaction, kind)
            if len(found) == first:
                transaction.put(MARKS + kind.encode(), msgspec.json.encode([*found, *marks]))

    def close(self) -> None:
        """Closes the file. The store cannot be used afterwards."""
        with self._closing:
            self._closed.set()
            self._environment.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turns LMDB's errors into StoreUnavailable."""
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreUnavailable(f"{self.path}: full; open it with a larger map size") from error
        except lmdb.ReadersFullError as error:
            raise StoreUnavailable(f"{self.path}: {ALL_READ}") from error
        except (lmdb.Error, OSError) as error:
            if "already open in this process" in str(error):
                raise StoreUnavailable(
                    f"{self.path}: another Service of this process has it open; use that one, or "
                    "close it first (service.close(), or `with Service.open(...) as service`)"
                ) from error
            raise StoreUnavailable(f"{self.path}: {error}") from error


def _read_marks(transaction: lmdb.Transaction[bytes], kind: str) -> list[str]:
    try:
        return msgspec.json.decode(transaction.get(MARKS + kind.encode()) or b"[]", type=list[str])
    except msgspec.DecodeError as error:
        raise CorruptHistory(f"the marks {kind} in the history store are damaged") from error


def _begin(environment: lmdb.Environment) -> lmdb.Transaction[bytes]:
    """Begins to read. A process that was killed leaves its slots; they are freed if all are used.

    Raises:
        lmdb.ReadersFullError: If living processes use all slots.
    """
    try:
        return environment.begin()
    except lmdb.ReadersFullError:
        environment.reader_check()
        return environment.begin()


def _open(path: Path, **options: Any) -> lmdb.Environment:
    """Opens a store. That takes a slot of a reader, and only an open store can free slots.

    So if all are used, this waits for the processes that have it open to free those of killed ones.

    Raises:
        StoreUnavailable: If its file is cut short.
        lmdb.Error: If it cannot be opened, or living processes use all slots.
    """
    last_s = time.monotonic() + WAIT_S
    while (path / DATA).exists() and not (path / DATA).stat().st_size:  # or it is being created
        if time.monotonic() > last_s:
            raise StoreUnavailable(
                f"{path / DATA} is empty; put back a copy, or move it away to begin a new store"
            )
        time.sleep(WAIT_S / 30)
    while True:
        try:
            environment = lmdb.open(str(path), max_readers=MAX_READERS, **options)
        except lmdb.ReadersFullError:
            if time.monotonic() > last_s:
                raise
            time.sleep(WAIT_S / 30)
        else:
            environment.reader_check()
            _check_length(path, environment)
            return environment


def _check_length(path: Path, environment: lmdb.Environment) -> None:
    """Checks that no page of a store is missing at the end of its file.

    The file is mapped into memory, and reading a page behind its end kills the process. A whole
    file may lack pages that were freed before they were written. So if the file is short, another
    process reads all of it.

    Raises:
        StoreUnavailable: If a page is missing.
    """
    page_bytes = environment.stat()["psize"]
    needed = (environment.info()["last_pgno"] + 1) * page_bytes
    size = (path / DATA).stat().st_size
    if size >= needed:
        return
    words = [sys.executable, "-c", READ_ALL, str(path), str(MAX_READERS)]
    # The rest of a page that is there in part reads as zeros.
    if size % page_bytes or subprocess.run(words, capture_output=True, check=False).returncode:
        environment.close()
        raise StoreUnavailable(
            f"{path / DATA} is cut short: it has {size} bytes; expected {needed}; put back a copy "
            "(recserve history restore), or move the folder away to begin a new store"
        )


def _free_slots(of: weakref.ref[LmdbStore], closed: threading.Event) -> None:
    """Frees the slots of killed readers from time to time, until the store is closed."""
    while not closed.wait(CHECK_S):
        if (store := of()) is None:
            return
        with store._closing, suppress(lmdb.Error):
            if not closed.is_set():
                store._environment.reader_check()
        del store


def copy_store(source: Path, target: Path) -> int:
    """Copies a store into an empty folder; another process may use it meanwhile.

    Returns:
        Number of keys in the copy, which is one consistent state.

    Raises:
        StoreUnavailable: If there is no store, or it cannot be read.
    """
    try:
        with _open(source, readonly=True, create=False) as store:
            store.copy(str(target), compact=True)
        with _open(target, readonly=True, create=False) as copied:
            return int(copied.stat()["entries"])
    except lmdb.ReadersFullError as error:
        raise StoreUnavailable(f"{source}: {ALL_READ}") from error
    except (lmdb.Error, OSError) as error:
        raise StoreUnavailable(f"{source}: {error}") from error
