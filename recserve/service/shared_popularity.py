"""Counts events for the list `popular` together with other servers.

Events only join a list in memory. A thread sends them every second and reads the counts that any
server has changed, so an event counts when it comes back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from recserve.features.catalog.popularity import Popularity
from recserve.features.catalog.redis_popularity import (
    COUNT,
    PopularityUnavailable,
    RedisPopularity,
)
from recserve.features.catalog.versions import CatalogVersion

log = logging.getLogger(__name__)
EVERY_S = 1.0
MAX_EVENTS = 1_000_000  # that wait for Redis; more are not counted, with a warning


class SharedPopularity:
    """Sends events to Redis and gives the counts of all servers to the list of this one."""

    def __init__(
        self,
        store: RedisPopularity,
        popularity: Popularity,
        items: Callable[[], CatalogVersion],
    ) -> None:
        """Calls nothing yet.

        Args:
            store: The counts of all servers.
            popularity: The list of this server, with the training events only.
            items: Returns the present items.
        """
        self._store, self._popularity, self._items = store, popularity, items
        self._lock = threading.Lock()  # of the next three
        self._keys: list[int] = []
        self._times: list[int] = []
        self._weights: list[float] = []
        self._delta: tuple[int, int, int, bytes] | None = None  # not acknowledged
        self._sequence = self._known = 0
        self._place: tuple[str, int] | None = None  # server and `since` of what has been read
        self._unplaced: dict[int, float] = {}  # counts of items that this server does not have yet
        self._failed = False
        self._exchanging = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="popular", daemon=True)

    def start(self) -> None:
        """Reads the counts, and starts the thread."""
        self._try()
        self._thread.start()

    def close(self) -> None:
        """Sends the last events."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._try()
        self._store.close()

    def add(
        self, keys: Sequence[int], times_us: Sequence[int], weights: np.ndarray | None = None
    ) -> None:
        """Counts events.

        Args:
            keys: [n] key of each event's item.
            times_us: [n] times in microseconds since 1970.
            weights: [n] how much each event counts; None: 1 each.
        """
        with self._lock:
            if len(self._keys) >= MAX_EVENTS:
                log.warning("%d events do not count for the list popular", len(keys))
                return
            self._keys += keys
            self._times += times_us
            self._weights += [1.0] * len(keys) if weights is None else weights.tolist()

    def exchange(self) -> None:
        """Sends what is new and reads what has changed.

        Raises:
            PopularityUnavailable: If Redis does not answer. The same delta is sent next time.
        """
        with self._exchanging:
            while self._exchange():
                pass
            self._place_new()

    def _exchange(self) -> bool:
        """Sends one delta and reads one page. Returns whether there is more to read."""
        if self._delta is None and self._place is not None:
            self._delta = self._next_delta(self._place[1])
        delta = self._delta or (0, 0, 0, b"")
        changes = self._store.exchange(*delta, self._known)
        self._delta = None
        place = changes.server, changes.since_us
        if place != self._place or changes.version < self._known:
            self._place, self._known, self._unplaced = place, 0, {}
            self._popularity.follow(changes.since_us, changes.begin_us)
            return True
        self._put(changes.keys, changes.counts, changes.latest_us)
        self._known = changes.reached
        return changes.reached < changes.version

    def _next_delta(self, since_us: int) -> tuple[int, int, int, bytes] | None:
        with self._lock:
            keys, times = np.array(self._keys, np.uint64), np.array(self._times, np.int64)
            weights = np.array(self._weights)
            self._keys, self._times, self._weights = [], [], []
        if not keys.size:
            return None
        found, inverse = np.unique(keys, return_inverse=True)
        counts = np.zeros(found.size, COUNT)
        counts["key"] = found
        half_life_us = self._popularity.half_life_s * 1e6
        # As of the newest event, so that no weight leaves the range of a float.
        latest_us = int(times.max())
        decayed = np.exp2((times - latest_us) / half_life_us)
        np.add.at(counts["weight"], inverse, weights * decayed)
        self._sequence += 1
        return self._sequence, latest_us, latest_us, counts.tobytes()

    def _put(self, keys: np.ndarray, counts: np.ndarray, latest_us: int) -> None:
        """Sets counts by item, and remembers those of items that this server does not have."""
        items = self._items()
        rows = items.rows_of_keys(keys)
        known = rows >= 0
        self._popularity.put(items.first_rows(rows[known]), counts[known], latest_us)
        for key in keys[known].tolist() if self._unplaced else ():
            self._unplaced.pop(key, None)  # an earlier count
        later = zip(keys[~known].tolist(), counts[~known].tolist(), strict=True)
        self._unplaced.update(later)

    def _place_new(self) -> None:
        """Sets the counts of items that this server has got since."""
        if self._unplaced:
            keys = np.array(list(self._unplaced), np.uint64)
            counts = np.array(list(self._unplaced.values()))
            self._unplaced = {}
            self._put(keys, counts, 0)

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._try()

    def _try(self) -> None:
        began_s = time.monotonic()
        try:
            self.exchange()
            if self._failed:
                log.info("the list popular is that of all servers again")
            self._failed = False
        except PopularityUnavailable as error:
            if not self._failed:
                log.error("the list popular of other servers is not read: %s", error)
            self._failed = True
        except Exception:
            log.exception("the list popular, after %.1f s", time.monotonic() - began_s)
