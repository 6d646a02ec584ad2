"""Live popularity: a decayed number of events per item, and the items in its order.

An event counts 1, or its weight, at its time and half as much after each half-life. The order
depends on ratios of counts only, and all counts decay alike. So time alone changes nothing: all
counts are stored as of one time, `since_us`, and an event counts
`weight * 2 ** ((time - since_us) / half_life)`.

Items start with their number of training events. Counts belong to an item's first row, so they
outlive a new vector of the item and a rollback.

Servers that count together have their counts in Redis (`redis_popularity.py`), and give what they
read to `follow` and `put`. Equal counts are in order of the rows, however they came about.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from recserve.bounds import MAX_TIME_US
from recserve.features.tables.arrays import are_among
from recserve.files import (
    FORMAT_KEY,
    UnreadableFile,
    check_metadata,
    read_arrays,
    regular_file,
    whole_file,
)

FORMAT = "recserve-popularity/1"
HALF_LIFE_S = 7 * 86_400.0
MAX_TOUCHED = 1024  # items with new events that are sorted into the order at each use
MAX_DOUBLINGS = 512.0  # float64 has room for as many on both sides of 1


@dataclass(frozen=True)
class SavedCounts:
    """Counts by item, for another process or another bundle.

    Attributes:
        keys: [n] uint64 key of each item.
        counts: [n] float64 counts.
        since_us: Time as of which they are stored, in microseconds since 1970.
    """

    keys: np.ndarray
    counts: np.ndarray
    since_us: int

    def save(self, path: Path) -> None:
        """Replaces a file atomically. Raises OSError."""
        since = np.array([self.since_us], np.int64)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, shared=True) as new:
            arrays = {"keys": self.keys, "counts": self.counts, "since_us": since}
            save_file(arrays, new, {FORMAT_KEY: FORMAT})

    @staticmethod
    def load(path: Path) -> SavedCounts:
        """Reads what `save` wrote. Raises UnreadableFile if it is damaged or of another version."""
        try:
            with safe_open(regular_file(path), "numpy") as file:
                check_metadata(file.metadata(), FORMAT, path)
        except (SafetensorError, OSError) as error:
            raise UnreadableFile(f"{path} is not a safetensors file: {error}") from error
        arrays = read_arrays(path, ("keys", "counts", "since_us"))
        keys, counts, since = (arrays[name] for name in ("keys", "counts", "since_us"))
        sizes = {"keys": (np.uint64, keys.size), "counts": (np.float64, keys.size)}
        for name, (kind, size) in {**sizes, "since_us": (np.int64, 1)}.items():
            if arrays[name].dtype != kind or arrays[name].shape != (size,):
                raise UnreadableFile(
                    f"{path}: {name} is {arrays[name].dtype}{list(arrays[name].shape)}; expected "
                    f"{np.dtype(kind)}[{size}]"
                )
        if counts.size and counts.min() < 0:
            raise UnreadableFile(f"{path}: a count is {counts.min():g}; expected 0 or more")
        if not 0 <= since[0] < MAX_TIME_US:
            raise UnreadableFile(f"{path}: since_us is {since[0]}; expected a time before 2255")
        return SavedCounts(keys, counts, int(since[0]))


class Popularity:
    """Decayed counts of events, and item rows in descending order of them. Thread-safe.

    Attributes:
        half_life_s: Time in which a count halves.
        since_us: Time as of which the counts are stored, in microseconds since 1970.
        latest_us: Time of the newest event, at least the time at which counting began.
    """

    def __init__(
        self, trained: np.ndarray, half_life_s: float = HALF_LIFE_S, now_us: int | None = None
    ) -> None:
        """Starts with the training events.

        Args:
            trained: [I] training events of each row of the bundle.
            half_life_s: Time in which a count halves.
            now_us: Present time in microseconds since 1970; None reads the clock.
        """
        self.half_life_s = half_life_s
        self.since_us = self.latest_us = time.time_ns() // 1000 if now_us is None else now_us
        self._trained = self._base = np.array(trained, np.float64)
        self._counts = self._base.copy()
        # All rows in order, except for those of `_touched`: their counts have changed since.
        self._order: np.ndarray | None = None
        self._touched: list[np.ndarray] = []
        self._lock = threading.Lock()

    def count(
        self, rows: np.ndarray, times_us: np.ndarray, weights: np.ndarray | None = None
    ) -> None:
        """Counts events.

        Args:
            rows: [n] first row of each event's item.
            times_us: [n] int64 time of each event in microseconds since 1970.
            weights: [n] how much each event counts; None: 1 each.
        """
        if not rows.size:
            return
        with self._lock:
            self._grow(int(rows.max()) + 1)
            self.latest_us = max(self.latest_us, int(times_us.max()))
            self._rebase()
            counts = np.exp2((times_us - self.since_us) / (self.half_life_s * 1e6))
            np.add.at(self._counts, rows, counts if weights is None else counts * weights)
            self._touch(rows)

    def at(self, rows: np.ndarray) -> np.ndarray:
        """Returns [n] float64 counts of first rows as of `latest_us`."""
        with self._lock:
            known = np.minimum(rows, self._counts.size - 1)
            counts = np.where(rows == known, self._counts[known], 0.0)
            passed = (self.latest_us - self.since_us) / (self.half_life_s * 1e6)
            return np.asarray(counts * 2.0**-passed)

    def best(self, count: int) -> np.ndarray:
        """Returns `count` int64 rows, most popular first; fewer if there are no more.

        They are first rows of items, hidden ones included. Equal counts are in order of the rows.
        """
        with self._lock:
            if self._order is None:
                self._order = np.argsort(-self._counts, kind="stable")
            return self._merge(count)

    def extend(self, num_rows: int) -> None:
        """Adds rows up to `num_rows`, which have no events yet."""
        if num_rows > self._counts.size:
            with self._lock:
                self._grow(num_rows)

    def load(self, counts: np.ndarray, rows: np.ndarray, since_us: int) -> None:
        """Replaces the counts of some rows by earlier ones of the same items.

        Args:
            counts: [n] float64 counts as of `since_us`.
            rows: [n] first row of each count.
            since_us: Their time in microseconds since 1970.
        """
        with self._lock:
            if rows.size:
                self._grow(int(rows.max()) + 1)
            self.since_us = self.latest_us = since_us
            self._counts[rows] = counts
            self._order, self._touched = None, []

    def follow(self, since_us: int, begin_us: int) -> None:
        """Begins to show the counts of several servers, with the training events only.

        Args:
            since_us: Time as of which `put` gives counts, in microseconds since 1970.
            begin_us: Time as of which the training events count.
        """
        with self._lock:
            passed = (begin_us - since_us) / (self.half_life_s * 1e6)
            self._base = self._trained * 2.0**passed
            self.since_us, self.latest_us = since_us, begin_us
            self._counts = np.zeros_like(self._counts)
            self._counts[: self._base.size] = self._base
            self._order, self._touched = None, []

    def put(self, rows: np.ndarray, counts: np.ndarray, latest_us: int) -> None:
        """Sets the counts of events of some items, beside their training events.

        Args:
            rows: [n] first row of each item.
            counts: [n] float64 counts of all servers as of `since_us`.
            latest_us: Time of the newest event of all servers.
        """
        with self._lock:
            self.latest_us = max(self.latest_us, latest_us)
            if not rows.size:
                return
            self._grow(int(rows.max()) + 1)
            known = np.minimum(rows, self._base.size - 1)
            self._counts[rows] = np.where(rows == known, self._base[known], 0.0) + counts
            self._touch(rows)

    def read(self) -> tuple[np.ndarray, int]:
        """Returns a copy of all counts as of `latest_us`, and that time."""
        with self._lock:
            scale = np.exp2((self.since_us - self.latest_us) / (self.half_life_s * 1e6))
            return self._counts * scale, self.latest_us

    def _rebase(self) -> None:
        """Moves `since_us` before the weight of a new event leaves the range of a float."""
        passed = (self.latest_us - self.since_us) / (self.half_life_s * 1e6)
        if passed > MAX_DOUBLINGS:
            self._counts *= np.exp2(-passed)
            self.since_us = self.latest_us

    def _touch(self, rows: np.ndarray) -> None:
        """Notes that counts have changed."""
        if self._order is not None:
            self._touched.append(rows)
            if sum(map(len, self._touched)) > MAX_TOUCHED:
                self._order, self._touched = self._merge(self._order.size), []

    def _grow(self, num_rows: int) -> None:
        size = self._counts.size
        if num_rows <= size:
            return
        self._counts = np.concatenate([self._counts, np.zeros(num_rows - size)])
        if self._order is not None:
            self._order = np.concatenate([self._order, np.arange(size, num_rows)])

    def _merge(self, count: int) -> np.ndarray:
        """Returns the first `count` rows of the order, with the touched rows in their places."""
        order, counts = self._order, self._counts
        assert order is not None
        if not self._touched:
            return order[:count].copy()
        touched = np.unique(np.concatenate(self._touched))
        self._touched = [touched]
        # Among so many rows, `count` are not touched; they are in order.
        head = order[: count + touched.size]
        if head.size < order.size:
            head = head[~are_among(head, touched)]
        else:
            moved = np.zeros(counts.size, dtype=bool)
            moved[touched] = True
            head = head[~moved[head]]
        touched = touched[np.argsort(-counts[touched], kind="stable")]
        firsts, places = (
            np.searchsorted(-counts[head], -counts[touched], side=side)
            for side in ("left", "right")
        )
        for at in np.flatnonzero(firsts < places).tolist():  # among equal counts
            first = firsts[at]
            places[at] = first + np.searchsorted(head[first : places[at]], touched[at])
        return np.insert(head, places, touched)[:count]
