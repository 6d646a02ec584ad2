"""Histories in LMDB: embedded, no server, every acknowledged append survives a kill.

A write transaction ends with a sync to disk before `append` returns; readers never wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np

from recserve.features.history.history import (
    DEFAULT_CAP,
    Applied,
    Change,
    CorruptHistory,
    HistoryStore,
    StoreOptions,
    StoreUnavailable,
    pack,
    read_stored,
    user_key,
)
from recserve.features.history.history_merge import merge

MAX_READERS = 512


class LmdbStore(HistoryStore):
    """A HistoryStore in the folder `path`, which may be open once per process.

    map_size_bytes: the most the file may grow to; the file is sparse and takes only what it holds.
    Raises StoreUnavailable if the folder cannot be opened.
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
        self.path = Path(path)
        self.cap = cap
        with self._failures():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._environment = lmdb.open(
                str(self.path), map_size=map_size_bytes, max_readers=MAX_READERS
            )

    def get_many(self, user_ids: Sequence[str]) -> list[np.ndarray | CorruptHistory]:
        """Events of each user, from one snapshot; a damaged value is reported in its place."""
        keys = [user_key(user_id) for user_id in user_ids]
        with self._failures(), self._environment.begin() as transaction:
            values = [transaction.get(key) for key in keys]
        return [read_stored(value) for value in values]

    def append_many(
        self, changes: Mapping[str, Sequence[Change]]
    ) -> dict[str, Applied | CorruptHistory]:
        """Make changes of several users in one transaction, synced to disk once."""
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
        """Forget a user; whether anything was stored."""
        key = user_key(user_id)
        with self._failures(), self._environment.begin(write=True) as transaction:
            return bool(transaction.delete(key))

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        self._environment.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreUnavailable(f"{self.path}: full; open it with a larger map size") from error
        except (lmdb.Error, OSError) as error:
            raise StoreUnavailable(f"{self.path}: {error}") from error
