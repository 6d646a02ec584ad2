"""Requests per minute and API key, as a token bucket for each key.

A key that was idle for a minute may send the requests of a minute at once. After that, it may send
another one each time that the rate grants one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from recserve.server.errors import QuotaExceeded

ROUNDING = 1e-9  # of a request; a client that waits for `Retry-After` is never too early


class Quotas:
    """Counts the requests of each key.

    Attributes:
        per_minute: Requests per minute of a key.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._rate, self._clock = per_minute / 60, clock
        self._lock = threading.Lock()
        self._left: dict[bytes, tuple[float, float]] = {}  # requests that are left, and since when

    def take(self, key: bytes) -> None:
        """Counts a request of a valid key. Raises QuotaExceeded if the key has none left."""
        with self._lock:
            now = self._clock()
            left, since = self._left.get(key, (self.per_minute, now))
            left = min(self.per_minute, left + (now - since) * self._rate)
            if left < 1 - ROUNDING:
                self._left[key] = left, now
                raise QuotaExceeded(
                    f"key_quota is {self.per_minute}: this key may send {self.per_minute} requests "
                    f"at once, and then one every {60 / self.per_minute:.3g} s",
                    (1 - left) / self._rate,
                )
            self._left[key] = left - 1, now
