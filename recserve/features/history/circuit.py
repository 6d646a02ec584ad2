"""A circuit: it refuses calls for a while after several slow ones."""

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

    It opens after several slow calls. While it is open, one call per `probe_s` seconds tries the
    store. The first quick call closes it.

    Args:
        trouble: What the store does while the circuit is open, such as `hangs`.
        most_slow: Slow calls among the last `window` ones that open it.
        window: Number of calls that count. Equal to `most_slow`, only slow calls in a row do.
        probe_s: Seconds between two tries while it is open.
        clock: Returns seconds.
    """

    def __init__(
        self,
        trouble: str,
        most_slow: int = 5,
        window: int = 5,
        probe_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trouble, self.most_slow, self.probe_s, self._clock = trouble, most_slow, probe_s, clock
        self._lock = threading.Lock()
        self._last: deque[bool] = deque(maxlen=window)  # whether each of the last calls was slow
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

    def slow(self) -> None:
        """Counts a call that took too long."""
        with self._lock:
            if self._next_probe_s is not None:
                return
            self._last.append(True)
            if sum(self._last) >= self.most_slow:
                log.error("the history store %s; requests go on without histories", self.trouble)
                self._next_probe_s = self._clock() + self.probe_s

    def quick(self) -> None:
        """Counts a call that the store answered in time."""
        with self._lock:
            if self._next_probe_s is not None:
                log.info("the history store answers again")
                self._last.clear()
            self._last.append(False)
            self._next_probe_s = None
