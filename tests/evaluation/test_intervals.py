"""Intervals beside formulas of others, and their coverage in simulations.

A simulation draws 2,000 samples with a fixed seed. An interval that covers 95 % covers fewer than
93.5 % of them with a probability of 0.1 %. Where an approximation is known to be a little off, the
bound is lower and says so.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from recserve.evaluation.intervals import (
    count_interval,
    coverage,
    difference_interval,
    mean_interval,
    quantile_interval,
)

SAMPLES = 2000


@pytest.mark.parametrize(("hits", "size"), [(0, 1), (1, 1), (0, 610), (3, 610), (610, 610)])
def test_hits_have_the_wilson_interval(hits: int, size: int) -> None:
    values = np.arange(size) < hits
    expected = stats.binomtest(hits, size).proportion_ci(0.95, method="wilson")
    # Bessel's correction of the variance counts as one user.
    assert mean_interval(values) == pytest.approx(tuple(expected), rel=3 / size, abs=1e-12)


@pytest.mark.parametrize("share, users", [(0.002, 610), (0.01, 100), (0.05, 610), (0.3, 100)])
def test_means_are_covered(share: float, users: int) -> None:
    """Recall, and NDCG with hits at all of ten places."""
    noise = np.random.default_rng(0)
    gains = 1 / np.log2(np.arange(10) + 2)
    for worth in (np.ones(10), gains):
        inside = 0
        for _ in range(SAMPLES):
            hits = noise.random(users) < share
            low, high = mean_interval(hits * worth[noise.integers(0, 10, users)])
            inside += low <= share * worth.mean() <= high
        # Wilson's interval covers 93.7 % of 100 users with a share of 0.3. The worth of few hits
        # is unknown, and the interval of their NDCG a little short.
        assert inside / SAMPLES > (0.92 if share * users > 5 else 0.9)


@pytest.mark.parametrize(("better", "worse"), [(0.001, 0.001), (0.02, 0.01), (0.2, 0.05)])
def test_differences_are_covered(better: float, worse: float) -> None:
    noise = np.random.default_rng(1)
    inside = 0
    for _ in range(SAMPLES):
        draw = noise.random(500)
        differences = (draw < better).astype(float) - (draw > 1 - worse)
        low, high = difference_interval(differences)
        inside += low <= better - worse <= high
    assert inside / SAMPLES > 0.935


def test_hits_have_the_interval_of_bonett_and_price() -> None:
    """7 users with a hit of the first model alone, 3 of the second alone, of 50."""
    differences = np.array([1.0] * 7 + [-1.0] * 3 + [0.0] * 40)
    first, second = 8 / 52, 4 / 52
    half = 1.959964 * ((first + second - (first - second) ** 2) / 52) ** 0.5
    middle = first - second
    assert difference_interval(differences) == pytest.approx((middle - half, middle + half))


def test_equal_models_do_not_differ_for_sure() -> None:
    low, high = difference_interval(np.zeros(100))
    assert -0.05 < low < 0 < high < 0.05
    assert difference_interval(np.ones(1))[1] <= 1


def test_counts_have_the_normal_interval() -> None:
    values = np.random.default_rng(4).poisson(3, 400)
    expected = stats.norm.interval(0.95, values.mean(), stats.sem(values))
    assert count_interval(values) == pytest.approx(expected)
    assert count_interval([2]) == (2, 2)


def test_coverage_is_counted_and_covered() -> None:
    """Slates of popular items; the mean coverage of so many users is inside the interval."""
    assert coverage(np.array([[0, 1], [1, -1], [1, 0]]), 4)[0] == 0.5
    noise = np.random.default_rng(2)
    weights = 1 / np.arange(1, 301)
    weights /= weights.sum()

    def draw() -> np.ndarray:
        keys = noise.exponential(size=(200, 300)) / weights  # without replacement, by weight
        return np.argpartition(keys, 4, axis=1)[:, :4]

    found = [coverage(draw(), 300) for _ in range(200)]
    mean = np.mean([share for share, _ in found])
    assert np.mean([low <= mean <= high for _, (low, high) in found]) > 0.9
    assert coverage(np.full((3, 2), -1), 7) == (0.0, (0.0, 0.0))


@pytest.mark.parametrize("share", [0.5, 0.99])
@pytest.mark.parametrize("size", [30, 400])
def test_quantiles_are_covered(share: float, size: int) -> None:
    noise = np.random.default_rng(3)
    true, inside = stats.expon.ppf(share), 0
    for _ in range(SAMPLES):
        low, high = quantile_interval(noise.exponential(size=size), share)
        inside += low <= true <= high
    if size * (1 - share) > 3:
        assert inside / SAMPLES > 0.935
    else:  # no sample of 30 bounds the 99th percentile
        assert high == pytest.approx(high) and low <= high
