"""A circuit: it refuses calls for a while after several that failed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from recserve.features.history.history import StoreUnavailable

log = logging.getLogger(__name__)


class Circuit:
    """Refuses calls to a history store while it is open, and is closed at first.

    It opens after several failures. Its owner says what a failure is. While it is open, one call
    per `probe_s` seconds tries the store. The first success closes it.

    Args:
        trouble: What the store does while the circuit is open, such as `hangs`.
        most_failures: Failures among the last `window` calls that open it.
        window: Number of calls that count. If it equals `most_failures`, failures in a row open it.
        probe_s: Seconds between two tries while it is open.
        clock: Returns seconds.
    """

    def __init__(
        self,
        trouble: str,
        most_failures: int = 5,
        window: int = 5,
        probe_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trouble, self.most_failures = trouble, most_failures
        self.probe_s, self._clock = probe_s, clock
        self._lock = threading.Lock()
        self._last: deque[bool] = deque(maxlen=window)  # whether each of the last calls failed
        self._next_probe_s: float | None = None  # None while it is closed

    @property
    def is_open(self) -> bool:
        """Whether it refuses calls."""
        return self._next_probe_s is not None

    def enter(self) -> None:
        """Begins a call. Raises StoreUnavailable if it is refused."""
        with self._lock:
            if self._next_probe_s is None:
                return
            if self._clock() < self._next_probe_s:
                raise StoreUnavailable(
                    f"the history store {self.trouble}; it is tried again every second"
                )
            self._next_probe_s = self._clock() + self.probe_s

    def count_failure(self) -> None:
        """Counts a failure."""
        with self._lock:
            if self._next_probe_s is not None:
                return
            self._last.append(True)
            if sum(self._last) >= self.most_failures:
                log.error("the history store %s; requests go on without histories", self.trouble)
                self._next_probe_s = self._clock() + self.probe_s

    def count_success(self) -> None:
        """Counts a success."""
        with self._lock:
            if self._next_probe_s is not None:
                log.info("the history store answers again")
                self._last.clear()
            self._last.append(False)
            self._next_probe_s = None
