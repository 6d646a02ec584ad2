"""Confidence intervals of evaluation figures over users.

They say how far a figure would move with other users of the same kind. They say nothing about
another seed of training. No interval draws random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from recserve.features.tables.mapped_arrays import blocks

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
MEAN_METHOD = "Wilson score interval over users, with the variance of the metric"
DIFFERENCE_METHOD = "Bonett-Price interval of the mean difference per user"
COVERAGE_METHOD = "normal interval with the jackknife variance over users"
COUNT_METHOD = "normal interval of the mean"
QUANTILE_METHOD = "order statistics of the timed requests"

Range = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """A figure with its 95 % interval.

    Attributes:
        value: The figure.
        low: Lower bound.
        high: Upper bound.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


def mean_interval(values: ArrayLike) -> Range:
    """Returns the interval of the mean of one value per user.

    For hits it is the Wilson interval. A metric such as NDCG varies less than hits with the same
    mean, which counts as more users. Unlike mean +- 1.96 standard errors, the interval is right
    for rare hits, and it is not empty without any.

    Args:
        values: [n] values between 0 and 1, n at least 1.

    Returns:
        Lower and upper bound, between 0 and 1.
    """
    values = np.asarray(values, dtype=np.float64)
    size, mean = float(values.size), float(values.mean())
    variance = float(values.var(ddof=1)) if values.size > 1 else 0.0
    if variance:
        size *= max(1.0, mean * (1 - mean) / variance)
    centre = (mean + Z**2 / (2 * size)) / (1 + Z**2 / size)
    half = Z * np.sqrt(mean * (1 - mean) / size + Z**2 / (4 * size**2)) / (1 + Z**2 / size)
    # Rounding moves no bound past the mean.
    return max(0.0, min(mean, float(centre - half))), min(1.0, max(mean, float(centre + half)))


def difference_interval(differences: ArrayLike) -> Range:
    """Returns the interval of the mean of one difference per user.

    Two users are added, one with the difference 1 and one with -1. This makes the interval right
    when few users differ. For hits it is the interval of Bonett and Price 2012.

    Args:
        differences: [n] differences between -1 and 1, of two models on the same user.

    Returns:
        Lower and upper bound, between -1 and 1.
    """
    differences = np.asarray(differences, dtype=np.float64)
    size = differences.size + 2
    mean = float(differences.sum()) / size
    variance = (float(np.square(differences).sum()) + 2) / size - mean**2
    half = Z * float(np.sqrt(variance / size))
    return max(-1.0, mean - half), min(1.0, mean + half)


def coverage(slates: ArrayLike, num_items: int) -> tuple[float, Range]:
    """Returns the share of the catalogue that occurs in any slate, and its interval.

    Without a user, the items that only this user's slate shows would be missing. The jackknife
    variance comes from their number.

    Args:
        slates: [n, k] item rows, -1 after the end of a shorter slate. A slate has an item once.
        num_items: I, the number of items.
    """
    slates = np.asarray(slates)
    counts, alone = np.zeros(num_items, np.int64), np.zeros(len(slates), np.int64)
    for part in blocks(len(slates)):
        counts += np.bincount(slates[part][slates[part] >= 0], minlength=num_items)
    for part in blocks(len(slates)):
        shown = slates[part] >= 0
        alone[part] = ((counts[np.where(shown, slates[part], 0)] == 1) & shown).sum(axis=1)
    users, covered = len(slates), int((counts > 0).sum())
    variance = (users - 1) * float(alone.var()) if users else 0.0
    half = Z * float(np.sqrt(variance))
    low, high = max(0.0, covered - half), min(float(num_items), covered + half)
    return covered / num_items, (low / num_items, high / num_items)


def count_interval(values: ArrayLike) -> Range:
    """Returns the normal interval of the mean of one count per user, which has no upper bound.

    Args:
        values: [n] values, n at least 1.
    """
    values = np.asarray(values, dtype=np.float64)
    deviation = float(values.std(ddof=1)) if values.size > 1 else 0.0
    half = Z * deviation / np.sqrt(values.size)
    return float(values.mean() - half), float(values.mean() + half)


def quantile_interval(values: ArrayLike, share: float) -> Range:
    """Returns the interval of a quantile, which lies between two of the sorted values.

    The number of values below the quantile is binomial; its normal approximation gives the places.
    Too few values to bound a high quantile leave the largest one as the upper bound.

    Args:
        values: [n] independent values, n at least 1.
        share: Which quantile, for example 0.5 for the median.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    size = ordered.size
    half = Z * np.sqrt(size * share * (1 - share))
    low = int(np.floor(size * share - half))
    high = int(np.ceil(size * share + half))
    return float(ordered[max(0, low - 1)]), float(ordered[min(size - 1, high)])
