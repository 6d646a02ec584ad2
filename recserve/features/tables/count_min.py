"""Count-min sketch: approximate counts of keys in a fixed amount of memory.

    estimate(key) = min over rows r of table[r, hash_r(key)]

An estimate is never below the true count. It exceeds the true count by more than `e / width` of the
total with a probability of at most `exp(-depth)`.

Source: Cormode and Muthukrishnan 2005, theorem 1.
"""

from __future__ import annotations

import math

import numpy as np


class CountMinSketch:
    """Approximate counts of integer keys.

    Attributes:
        bits: Base-2 logarithm of `width`.
        width: Counters per row, a power of two.
        table: [depth, width] float64 counters.
        total: Sum of all added counts.
    """

    def __init__(self, width: int, depth: int, seed: int = 0) -> None:
        """Starts an empty sketch.

        Args:
            width: Counters per row, rounded up to a power of two.
            depth: Number of rows.
            seed: Seed of the hash functions.

        Raises:
            ValueError: If `width` or `depth` is not positive.
        """
        for name, value in (("width", width), ("depth", depth)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.bits = math.ceil(math.log2(width))
        self.width = 1 << self.bits
        self.table = np.zeros((depth, self.width), dtype=np.float64)
        self.total = 0.0
        draw = np.random.default_rng(seed)
        # Multiply-shift hashing: multiply by an odd factor and take the upper bits.
        self._factors = draw.integers(0, 2**63, (depth, 1), dtype=np.uint64) * np.uint64(2)
        self._factors += np.uint64(1)
        self._terms = draw.integers(0, 2**64, (depth, 1), dtype=np.uint64)

    def add(self, keys: np.ndarray, counts: np.ndarray | float = 1.0) -> None:
        """Adds counts.

        Args:
            keys: [n] keys of any integer type. Keys may repeat.
            counts: Non-negative counts, [n] or one for all keys.
        """
        weights = np.broadcast_to(np.asarray(counts, np.float64), keys.shape)
        for row, places in zip(self.table, self._places(keys), strict=True):
            row += np.bincount(places, weights, self.width)
        self.total += float(weights.sum())

    def estimate(self, keys: np.ndarray) -> np.ndarray:
        """Returns [n] float64 estimates, never below the true counts."""
        counts: np.ndarray = np.take_along_axis(self.table, self._places(keys), axis=1).min(0)
        return counts

    def _places(self, keys: np.ndarray) -> np.ndarray:
        """Returns [depth, n] int64, the counter of each key in each row."""
        if not self.bits:
            return np.zeros((len(self.table), keys.size), dtype=np.int64)
        mixed = keys.astype(np.uint64)[None, :] * self._factors + self._terms
        return (mixed >> np.uint64(64 - self.bits)).astype(np.int64)
