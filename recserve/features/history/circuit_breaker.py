"""Stops calling a history store that hangs, so that requests do not wait for it in turn."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from recserve.features.history.history import (
    Applied,
    Change,
    CorruptHistory,
    HistoryStore,
    StoredUsers,
    StoreOptions,
    StoreUnavailable,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
SLOW_S = 0.1  # a failure that took less costs nobody anything


class CircuitBreaker(HistoryStore):
    """A history store that refuses calls at once while the store behind it hangs.

    It opens after `most_failures` calls in a row that failed slowly. While it is open, one call
    per `probe_s` seconds tries the store. The first call that succeeds closes it. Failures that
    are quick, such as a refused connection, do not count.

    Attributes:
        store: The store behind it.
        most_failures: Slow failures in a row that open it.
        probe_s: Seconds between two tries while it is open.
    """

    def __init__(
        self,
        store: HistoryStore,
        most_failures: int = 5,
        probe_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.ttl_s = store, store.ttl_s
        self.most_failures, self.probe_s = most_failures, probe_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._next_probe_s: float | None = None  # None while it is closed

    @classmethod
    def open(cls, url: str, options: StoreOptions) -> HistoryStore:
        """Not supported: a breaker is put around an open store."""
        raise NotImplementedError("a circuit breaker has no URL")

    def get_many(self, user_ids: Sequence[str]) -> list[np.ndarray | CorruptHistory]:
        """As the store's own."""
        return self._call(lambda: self.store.get_many(user_ids))

    def append_many(
        self, changes: Mapping[str, Sequence[Change]]
    ) -> dict[str, Applied | CorruptHistory]:
        """As the store's own."""
        return self._call(lambda: self.store.append_many(changes))

    def delete(self, user_id: str) -> bool:
        """As the store's own."""
        return self._call(lambda: self.store.delete(user_id))

    def users(self, prefix: str, limit: int, after: str | None) -> StoredUsers:
        """As the store's own."""
        return self._call(lambda: self.store.users(prefix, limit, after))

    def close(self) -> None:
        """Releases the store."""
        self.store.close()

    def _call(self, function: Callable[[], T]) -> T:
        """Calls the store. Raises StoreUnavailable if it fails, or at once while it hangs."""
        self._enter()
        began_s = self._clock()
        try:
            answer = function()
        except StoreUnavailable:
            self._failed(self._clock() - began_s)
            raise
        self._succeeded()
        return answer

    def _enter(self) -> None:
        with self._lock:
            if self._next_probe_s is None:
                return
            if self._clock() < self._next_probe_s:
                raise StoreUnavailable("the history store hangs; it is tried again every second")
            self._next_probe_s = self._clock() + self.probe_s

    def _failed(self, seconds: float) -> None:
        with self._lock:
            if self._next_probe_s is not None or seconds < SLOW_S:
                return
            self._failures += 1
            if self._failures >= self.most_failures:
                log.error("the history store hangs; requests go on without histories")
                self._next_probe_s = self._clock() + self.probe_s

    def _succeeded(self) -> None:
        with self._lock:
            if self._next_probe_s is not None:
                log.info("the history store answers again")
            self._failures, self._next_probe_s = 0, None
