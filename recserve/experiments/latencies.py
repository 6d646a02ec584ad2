"""Latencies as numbers of requests in logarithmic buckets, and percentiles of them.

The edges of the buckets grow by a constant factor, so a percentile is known within ERROR of its
value, whatever it is. The numbers of several windows, processes or servers add up exactly.

Source: Masson, Rim and Lee 2019, "DDSketch: a fast and fully-mergeable quantile sketch with
relative-error guarantees", section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ERROR = 0.01  # of a percentile, as a share of it
GROWTH = (1 + ERROR) / (1 - ERROR)
LOG_GROWTH = math.log(GROWTH)
# Bucket n ends at SHORTEST_S * GROWTH**n. The last one ends after two hours; a deadline is at most
# one hour.
SHORTEST_S = 1e-5
NUM_LATENCIES = 1024


@dataclass(frozen=True)
class Percentile:
    """A percentile with its interval.

    Attributes:
        value: The percentile, within ERROR.
        low: Lower end; None if there are too few values.
        high: Upper end; None if there are too few values.
    """

    value: float
    low: float | None
    high: float | None


def bucket(seconds: float) -> int:
    """Returns the bucket of a latency."""
    if seconds <= SHORTEST_S:
        return 0
    return min(math.ceil(math.log(seconds / SHORTEST_S) / LOG_GROWTH), NUM_LATENCIES - 1)


def upper_edge(number: int) -> float:
    """Returns the longest latency of a bucket, in seconds."""
    return SHORTEST_S * GROWTH**number


def percentile(latencies: Ints, share: float, confidence: float) -> Percentile | None:
    """Returns a percentile and its interval by order statistics; None without values.

    The ranks of the interval come from the binomial distribution in its normal approximation. They
    assume independent requests, so the interval is a guide. `recserve ab` has better ones. The ends
    are edges of buckets, so the interval is too long by ERROR rather than too short.

    Args:
        latencies: [NUM_LATENCIES] requests in each bucket.
        share: 0.99 for the 99th percentile.
        confidence: Two-sided confidence of the interval, such as 0.95.
    """
    ranks = np.cumsum(latencies)
    count = int(ranks[-1])
    if not count:
        return None

    def place(rank: int) -> int:
        return int(np.searchsorted(ranks, rank, side="right"))

    spread = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread) - 1, math.ceil(count * share + spread)
    middle = place(min(count - 1, math.ceil(count * share) - 1))
    return Percentile(
        value=upper_edge(middle) * (1 - ERROR),  # as far from one edge as from the other
        low=upper_edge(place(low) - 1) if low >= 0 else None,
        high=upper_edge(place(high)) if high < count else None,
    )
