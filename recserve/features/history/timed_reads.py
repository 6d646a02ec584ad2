"""Reads of single histories that a request waits for a limited time only."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from recserve.features.history.circuit import Circuit
from recserve.features.history.history import CorruptHistory, HistoryStore, StoreUnavailable

NUM_THREADS = 32  # as many as the server has for requests that read the store


class TimedReads:
    """Reads histories for requests, each within `timeout_s`.

    A read that takes longer continues on a thread, and its result is dropped. When five of the last
    ten reads took longer or failed, reads are refused at once, except for one per second that tries
    the store. A change of a history is not limited: it waits until the store says what is stored.

    Attributes:
        store: The store, which need not know of time limits.
        timeout_s: Time limit of a read.
        circuit: Refuses reads while the store is slow or fails.
    """

    def __init__(
        self,
        store: HistoryStore,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.timeout_s = store, timeout_s
        self.circuit = Circuit("is too slow or fails", most_failures=5, window=10, clock=clock)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "history")

    def get(self, user_id: str) -> np.ndarray:
        """Returns a user's events (EVENT_DTYPE).

        Raises:
            StoreUnavailable: If the store fails or is slow.
            CorruptHistory: If the stored value is damaged.
        """
        self.circuit.enter()
        read = self._threads.submit(self.store.get, user_id)
        wait((read,), self.timeout_s)
        if not read.done():
            read.cancel()
            self.circuit.count_failure()
            raise StoreUnavailable(f"no answer within {1e3 * self.timeout_s:g} ms")
        try:
            history = read.result()
        except StoreUnavailable:
            self.circuit.count_failure()
            raise
        except CorruptHistory:
            self.circuit.count_success()
            raise
        self.circuit.count_success()
        return history

    def close(self) -> None:
        """Takes no more reads. Threads end with the reads that they have."""
        self._threads.shutdown(wait=False, cancel_futures=True)
