"""Stores histories in LMDB, an embedded database. Acknowledged appends survive a crash.

A write transaction syncs to disk before `append` returns. Readers never wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb
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
            self._environment = lmdb.open(
                str(self.path), map_size=map_size_bytes, max_readers=MAX_READERS
            )

    def get_many(self, user_ids: Sequence[str]) -> list[np.ndarray | CorruptHistory]:
        """Returns the events of each user, all from one snapshot.

        A damaged value is returned as a CorruptHistory in its place.
        """
        keys = [user_key(user_id) for user_id in user_ids]
        with self._failures(), self._environment.begin() as transaction:
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
        with self._failures(), self._environment.begin() as reading, reading.cursor() as cursor:
            there = cursor.set_range(start) if start else cursor.first()
            while there and len(found) <= limit and cursor.key().startswith(first):
                found.append(bytes(cursor.key()))
                there = cursor.next()
        ids = [key.decode() for key in found[:limit]]
        return StoredUsers(ids, ids[-1] if len(found) > limit else None)

    def close(self) -> None:
        """Closes the file. The store cannot be used afterwards."""
        self._environment.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turns LMDB's errors into StoreUnavailable."""
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreUnavailable(f"{self.path}: full; open it with a larger map size") from error
        except (lmdb.Error, OSError) as error:
            if "already open in this process" in str(error):
                raise StoreUnavailable(
                    f"{self.path}: another Service of this process has it open; use that one, or "
                    "close it first (service.close(), or `with Service.open(...) as service`)"
                ) from error
            raise StoreUnavailable(f"{self.path}: {error}") from error


def copy_store(source: Path, target: Path) -> int:
    """Copies a store into an empty folder; another process may use it meanwhile.

    Returns:
        Number of keys in the copy, which is one consistent state.

    Raises:
        StoreUnavailable: If there is no store, or it cannot be read.
    """
    try:
        with lmdb.open(str(source), readonly=True, create=False, max_readers=MAX_READERS) as store:
            store.copy(str(target), compact=True)
        with lmdb.open(str(target), readonly=True, create=False) as copied:
            return int(copied.stat()["entries"])
    except (lmdb.Error, OSError) as error:
        raise StoreUnavailable(f"{source}: {error}") from error
