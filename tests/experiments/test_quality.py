"""Overlap, NDCG and guardrails, against hand-made values and scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from recserve.experiments.statistics import (
    Interval,
    Observations,
    guard_mean,
    guard_overlap,
    guard_share,
    ndcg,
    non_inferior,
    overlap,
    time_blocks,
    unit_error,
)


def test_overlap_counts_common_items_of_the_longer_slate():
    assert overlap(["a", "b", "c", "d"], ["b", "a", "x", "y"]) == 0.5
    assert overlap(["a"], ["a", "b", "c", "d"]) == 0.25
    assert overlap([], []) == 1.0
    assert overlap([], ["a"]) == 0.0


def test_ndcg_of_one_item_is_that_of_its_rank():
    assert ndcg(["a", "b", "c"], "a", 10) == 1.0
    assert ndcg(["a", "b", "c"], "c", 10) == 1 / math.log2(4)
    assert ndcg(["a", "b", "c"], "c", 2) == 0.0
    assert ndcg([], "c", 10) == 0.0


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [(-0.01, 0.2, "pass"), (-0.2, -0.06, "fail"), (-0.2, 0.1, "unclear"), (-0.05, 0.0, "pass")],
)
def test_non_inferiority_looks_at_the_whole_interval(low, high, outcome):
    assert non_inferior(Interval((low + high) / 2, low, high), 0.05) == outcome


def test_newcombes_interval_is_that_of_his_paper():
    """Newcombe 1998, table II (a): 56/70 - 48/80, method 10: 0.0524 to 0.3339."""
    guard = guard_share("failed", (56, 48), (70, 80), margin=0.05)
    assert guard.change.low == pytest.approx(0.0524, abs=1e-4)
    assert guard.change.high == pytest.approx(0.3339, abs=1e-4)
    assert guard.outcome == "pass"


def test_equal_slates_pass_once_there_are_enough_of_them():
    assert guard_overlap([1.0] * 10, 0.05).outcome == "unclear"
    assert guard_overlap([1.0] * 200, 0.05).outcome == "pass"
    other = guard_overlap([0.5, 0.6, 0.4] * 50, 0.05)
    assert other.outcome == "fail"
    assert other.change.estimate == pytest.approx(-0.5)
    assert other.change.low < other.change.estimate < other.change.high
    assert type(guard_overlap([1.0] * 10, 0.05).change.low) is float


@pytest.mark.parametrize("counts", [(1, 1), (1, 5), (2, 1), (7, 4)])
@pytest.mark.parametrize("per_unit", [1, 3])
def test_the_error_over_units_is_that_of_their_means(counts, per_unit):
    """Units of equal size: Welch's error of their means. One unit in an arm has no spread."""
    drawn = np.random.default_rng(sum(counts))
    means = [drawn.normal(size=count) for count in counts]
    values = np.repeat(np.concatenate(means), per_unit)
    treated = np.repeat([False, True], counts).repeat(per_unit)
    units = np.repeat(np.arange(sum(counts)), per_unit)
    observed = Observations(values, treated, time_blocks(np.arange(values.size), 5), units)
    wanted = sum(float(m.var(ddof=1)) / m.size for m in means if m.size > 1)
    assert unit_error(observed) == pytest.approx(math.sqrt(wanted), abs=1e-12)


@pytest.mark.parametrize(("num_units", "num_blocks"), [(7, 20), (30, 4), (None, 5), (3, 2)])
def test_a_guarded_mean_has_the_interval_of_a_plain_loop(num_units, num_blocks):
    """The larger error of blocks and units, and the degrees of freedom of the fewer."""
    drawn = np.random.default_rng(num_blocks)
    values, treated = drawn.normal(size=60), np.arange(60) % 2 == 1
    units = None if num_units is None else np.arange(60) // 2 % (num_units // 2) * 2 + treated
    if num_units is not None and num_units % 2:
        units[0] = num_units - 1
    blocks = time_blocks(np.arange(60), num_blocks)
    means = [values[treated == arm].mean() for arm in (False, True)]
    change, square = means[1] - means[0], 0.0
    for block in range(num_blocks):
        own = [values[(blocks == block) & (treated == arm)] - means[arm] for arm in (False, True)]
        square += ((own[1].sum() - own[0].sum()) / 30) ** 2
    observed = Observations(values, treated, blocks, units)
    error, degrees = math.sqrt(square * num_blocks / (num_blocks - 1)), num_blocks - 1
    if units is not None:
        error, degrees = max(error, unit_error(observed)), min(degrees, num_units - 2)
    half = stats.t.ppf(0.975, degrees) * error
    found = guard_mean("NDCG", observed, 0.1, "lower").change
    assert (found.estimate, found.low, found.high) == pytest.approx(
        (change, change - half, change + half)
    )
