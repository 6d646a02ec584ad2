"""Time blocks of a run, and how long its latencies stay correlated.

Source: Geyer 1992, "Practical Markov chain Monte Carlo" (initial positive sequence).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import fft

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIN_BLOCKS = 30
MAX_BLOCKS = 200
# A block is this many times longer than the arms' difference stays correlated.
BLOCK_TIMES = 10
GROUP_SHOTS = 8


def autocorrelation_time(series: Floats) -> float:
    """Returns the number of consecutive values that carry the information of one.

    It is 1 for independent values, at least 1 otherwise: one plus twice the sum of the
    autocorrelations, up to the first pair of lags whose sum is not positive (Geyer 1992).
    """
    n = len(series)
    centred = series - series.mean() if n else series
    power = float(np.dot(centred, centred))
    if n < 4 or power <= 0:
        return 1.0
    size = fft.next_fast_len(2 * n)
    spectrum = np.abs(fft.rfft(centred, size)) ** 2
    correlations = fft.irfft(spectrum, size)[: n // 2] / power
    pairs = correlations[: len(correlations) // 2 * 2].reshape(-1, 2).sum(axis=1)
    negative = np.flatnonzero(pairs <= 0)
    pairs = pairs[: negative[0]] if len(negative) else pairs
    return float(max(1.0, 2 * pairs.sum() - 1))


def effective_size(series: Floats) -> float:
    """Returns how many independent values say as much about the mean as these."""
    return len(series) / autocorrelation_time(series)


def difference_time(values: Floats, treated: NDArray[np.bool_], order: Ints) -> float:
    """Returns the number of consecutive shots over which the arms' difference stays correlated.

    A wave of slow requests that hits both arms alike does not count. The difference of mean log
    values is taken in groups of eight shots; its correlation time, in shots, is at least eight.

    Args:
        values: [n] values above 0.
        treated: [n] whether the value is of the treatment arm.
        order: [n] number of the shot in time.
    """
    shots, places = np.unique(order, return_inverse=True)
    groups = places // GROUP_SHOTS
    size = len(shots) // GROUP_SHOTS + 1
    means = []
    for arm in (False, True):
        mine = treated == arm
        counts = np.bincount(groups[mine], minlength=size)
        sums = np.bincount(groups[mine], np.log(values[mine]), minlength=size)
        with np.errstate(invalid="ignore", divide="ignore"):
            means.append(sums / counts)
    difference = means[1] - means[0]
    return GROUP_SHOTS * autocorrelation_time(difference[np.isfinite(difference)])


def count_blocks(num_shots: int, correlation_time: float) -> int:
    """Returns the number of time blocks: as many as are long enough, from 30 to 200."""
    wanted = int(num_shots / (BLOCK_TIMES * correlation_time))
    return max(2, min(max(wanted, MIN_BLOCKS), MAX_BLOCKS, num_shots // 2))


def time_blocks(order: Ints, num_blocks: int) -> Ints:
    """Returns [n] block numbers: contiguous in time, with as many shots in each.

    Args:
        order: [n] number of the shot in time; calls of a pair share it and stay together.
        num_blocks: Number of blocks.
    """
    shots, places = np.unique(order, return_inverse=True)
    num_blocks = min(num_blocks, max(len(shots), 1))
    result: Ints = (places.astype(np.int64) * num_blocks) // max(len(shots), 1)
    return result
