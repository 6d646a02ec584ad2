"""Requests per minute and API key, as a token bucket for each key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from recserve.server.errors import QuotaExceeded

BURST_S = 10.0  # a key that was idle may send the requests of so many seconds at once


class Quotas:
    """Counts the requests of each key.

    Attributes:
        per_minute: Requests per minute of a key.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._rate, self._clock = per_minute / 60, clock
        self._most = max(1.0, self._rate * BURST_S)
        self._lock = threading.Lock()
        self._left: dict[bytes, tuple[float, float]] = {}  # requests that are left, and since when

    def take(self, key: bytes) -> None:
        """Counts a request of a valid key. Raises QuotaExceeded if the key has none left."""
        with self._lock:
            now = self._clock()
            left, since = self._left.get(key, (self._most, now))
            left = min(self._most, left + (now - since) * self._rate)
            if left < 1:
                self._left[key] = left, now
                raise QuotaExceeded(
                    f"this key may send {self.per_minute} requests per minute",
                    (1 - left) / self._rate,
                )
            self._left[key] = left - 1, now
