"""Stops calling a history store that hangs, so that requests do not wait for it in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from recserve.features.history.circuit import Circuit
from recserve.features.history.history import (
    Applied,
    Change,
    CorruptHistory,
    HistoryStore,
    StoredUsers,
    StoreOptions,
    StoreUnavailable,
)

T = TypeVar("T")
SLOW_S = 0.1  # a failure that took less delays no request


class CircuitBreaker(HistoryStore):
    """A history store that refuses calls at once while the store behind it hangs.

    It opens after `most_failures` calls in a row that failed slowly. While it is open, one call
    per `probe_s` seconds tries the store. The first call that succeeds closes it. Failures that
    are quick, such as a refused connection, do not count.

    Attributes:
        store: The store behind it.
        circuit: Refuses calls after `most_failures` slow failures in a row.
    """

    def __init__(
        self,
        store: HistoryStore,
        most_failures: int = 5,
        probe_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.ttl_s, self._clock = store, store.ttl_s, clock
        self.circuit = Circuit("hangs", most_failures, most_failures, probe_s, clock)

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
        self.circuit.enter()
        began_s = self._clock()
        try:
            answer = function()
        except StoreUnavailable:
            if self._clock() - began_s >= SLOW_S:
                self.circuit.count_failure()
            raise
        self.circuit.count_success()
        return answer
