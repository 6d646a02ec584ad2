"""Intervals, blocks, effective sizes and checks, against scipy, theory and simulation."""

import numpy as np
import pytest
from scipy import stats

from recserve.experiments.statistics import (
    MAX_BLOCKS,
    MIN_BLOCKS,
    STATISTICS,
    UNBOUNDED,
    BlockScores,
    Observations,
    autocorrelation_time,
    compare,
    count_blocks,
    difference_time,
    effective_size,
    no_difference_p,
    sample_ratio_p,
    sign_limit,
    sign_test,
    time_blocks,
    unit_inflation,
)
from recserve.load.comparison import percent


def waves(size, keep, drawn):
    """A stationary AR(1) series of variance 1."""
    from scipy.signal import lfilter

    shocks = drawn.normal(0, np.sqrt(1 - keep**2), size)
    shocks[0] = drawn.normal()
    return lfilter([1.0], [1.0, -keep], shocks)


def experiment(drawn, size=4000, effect=0.0, keep=0.99, num_blocks=40):
    """Arms drawn request by request on log-normal latencies with waves."""
    treated = drawn.random(size) < 0.5
    values = 10 * np.exp(0.3 * waves(size, keep, drawn) + drawn.normal(0, 0.2, size))
    values[treated] *= 1 + effect
    return Observations(values, treated, time_blocks(np.arange(size), num_blocks))


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_correlation_time_is_that_of_theory(keep):
    """AR(1): (1 + a) / (1 - a), within 20 % at 100,000 values."""
    series = waves(100_000, keep, np.random.default_rng(3))
    wanted = (1 + keep) / (1 - keep)
    assert autocorrelation_time(series) == pytest.approx(wanted, rel=0.2)
    assert effective_size(series) == pytest.approx(100_000 / wanted, rel=0.25)


@pytest.mark.parametrize("series", [[], [1.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
def test_short_and_constant_series_have_correlation_time_one(series):
    assert autocorrelation_time(np.array(series)) == 1.0


def test_waves_that_hit_both_arms_do_not_count_for_the_difference():
    drawn = np.random.default_rng(5)
    observed = experiment(drawn, size=50_000)
    order = np.arange(50_000)
    assert autocorrelation_time(np.log(observed.values)) > 50
    assert difference_time(observed.values, observed.treated, order) < 16


def test_blocks_are_contiguous_even_and_keep_pairs_together():
    order = np.repeat(np.arange(103), 2)
    blocks = time_blocks(order, 10)
    assert (np.diff(blocks) >= 0).all() and set(blocks) == set(range(10))
    assert (blocks[::2] == blocks[1::2]).all()
    assert np.ptp(np.bincount(blocks)) <= 2
    assert count_blocks(10, 1.0) == 5
    assert count_blocks(1000, 8.0) == MIN_BLOCKS
    assert count_blocks(10**6, 8.0) == MAX_BLOCKS
    assert count_blocks(16_000, 8.0) == MAX_BLOCKS


def test_scores_of_equal_arms_add_up_to_the_difference():
    """By hand: of four values, 3 and 4 are above the pooled median; the treatment holds both."""
    observed = Observations(
        np.array([1.0, 2.0, 3.0, 4.0]),
        np.array([False, False, True, True]),
        np.array([0, 1, 0, 1]),
    )
    assert BlockScores(observed, "mean").at_shift(0.0).tolist() == [1.0, 1.0]
    assert BlockScores(observed, "mean").at_shift(2.0).tolist() == [0.0, 0.0]
    assert BlockScores(observed, "p50").at_factor(0.0).sum() == 0.5


def test_the_sign_test_is_the_exact_one():
    """Ten blocks have 1,024 signs; 4,000 drawn ones are within four standard errors."""
    import itertools

    scores = np.random.default_rng(4).normal(0.5, 1, 10)
    every = np.array(list(itertools.product([-1, 1], repeat=10)))
    exact = (np.abs(every @ scores) >= abs(scores.sum()) - 1e-12).mean()
    assert sign_test(scores) == pytest.approx(exact, abs=4 * np.sqrt(exact / 4000))
    limit = np.quantile(np.abs(every @ scores), 0.9)
    assert sign_limit(scores, 0.9) == pytest.approx(limit, rel=0.05)
    # Scores of no difference, which all signs reach.
    assert sign_test(np.zeros(10)) == sign_test(np.array([1.0, -1.0])) == 1.0


def test_interval_and_p_value_agree():
    drawn = np.random.default_rng(3)
    for effect in (0.0, 0.02, 0.05):
        observed = experiment(drawn, effect=effect)
        found = compare(observed, "p90")
        assert found.relative.excludes_zero == (found.p_value < 0.05)


def test_an_interval_without_an_end_is_marked_and_stays_a_number():
    """Two blocks never give a sum that fewer than 5 % of the signs reach."""
    observed = Observations(
        np.array([1.0, 2.0, 1.1, 2.2]), np.array([False, True, False, True]), np.array([0, 0, 1, 1])
    )
    found = compare(observed, "mean")
    assert found.relative.high == pytest.approx(UNBOUNDED - 1)
    assert percent(found.relative.high) == "+\N{INFINITY}"
    assert np.isfinite([found.absolute.low, found.absolute.high, found.log_error]).all()
    assert not found.relative.excludes_zero


def test_the_error_of_independent_means_is_that_of_theory():
    """Log ratio of two means: sqrt of the summed squared relative errors, within 15 %."""
    drawn = np.random.default_rng(11)
    values = drawn.gamma(4.0, 1.0, 20_000)
    treated = drawn.random(20_000) < 0.5
    effect = compare(Observations(values, treated, time_blocks(np.arange(20_000), 200)), "mean")
    wanted = np.sqrt(2 * (values.std() / values.mean()) ** 2 / 10_000)
    assert effect.log_error == pytest.approx(wanted, rel=0.15)
    assert effect.control == pytest.approx(values[~treated].mean())
    assert effect.p_value == pytest.approx(
        stats.ttest_ind(values[treated], values[~treated]).pvalue, abs=0.1
    )


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_scaled_arm_has_that_effect_on_every_statistic(statistic):
    observed = experiment(np.random.default_rng(2), size=40_000, effect=0.2)
    effect = compare(observed, statistic)
    assert abs(effect.log_ratio - np.log(1.2)) < 4 * effect.log_error
    assert effect.relative.excludes_zero
    assert effect.p_value < 1e-3
    assert effect.absolute.low < effect.absolute.estimate < effect.absolute.high
    assert effect.absolute.estimate == pytest.approx(effect.treatment - effect.control)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_false_alarms_on_waves_stay_near_five_per_cent(statistic):
    """300 A/A runs; binomial with 5 %: at most 29 alarms, and at least 3, with p > 0.998."""
    drawn = np.random.default_rng(42)
    alarms = sum(no_difference_p(experiment(drawn), statistic) < 0.05 for n in range(300))
    low, high = stats.binom.interval(0.998, 300, 0.05)
    assert low <= alarms <= high


def test_independent_requests_would_raise_false_alarms_where_arms_take_turns():
    """Why arms are interleaved: A first and then B on the same waves, 100 runs."""
    drawn = np.random.default_rng(9)
    alarms = 0
    for _ in range(100):
        observed = experiment(drawn)
        half = len(observed.values) // 2
        logs = np.log(observed.values)
        alarms += stats.ttest_ind(logs[:half], logs[half:]).pvalue < 0.05
    assert alarms > 50


def test_units_that_stay_in_one_arm_widen_the_interval():
    """40 users with levels of their own, 200 A/A runs by user: alarms at 5 % with units counted."""
    drawn = np.random.default_rng(6)
    alarms, naive = 0, 0
    for _ in range(200):
        users = drawn.integers(0, 40, 2000)
        levels = drawn.normal(0, 0.3, 40)
        arms = drawn.permutation(40) < 20
        values = np.exp(levels[users] + drawn.normal(0, 0.3, 2000))
        blocks = time_blocks(np.arange(2000), 40)
        counted = Observations(values, arms[users], blocks, users)
        alarms += no_difference_p(counted, "p50") < 0.05
        naive += no_difference_p(Observations(values, arms[users], blocks), "p50") < 0.05
    assert naive > 70
    low, high = stats.binom.interval(0.998, 200, 0.05)
    assert low <= alarms <= high
    assert unit_inflation(counted, "p50") > 2


def test_units_drawn_anew_for_each_request_change_nothing():
    observed = experiment(np.random.default_rng(8))
    assert unit_inflation(observed, "p99") == 1.0


@pytest.mark.parametrize(
    ("values", "treated", "blocks"),
    [
        ([1.0, 2.0], [True, True], [0, 1]),
        ([1.0, 2.0], [True, False], [0, 0]),
        ([1.0, 0.0], [True, False], [0, 1]),
    ],
)
def test_what_cannot_be_compared_is_refused(values, treated, blocks):
    observed = Observations(np.array(values), np.array(treated), np.array(blocks))
    with pytest.raises(ValueError):
        compare(observed, "mean")


def test_sample_ratio_is_scipys_chi_square():
    assert sample_ratio_p((5100, 4900)) == stats.chisquare([5100, 4900]).pvalue
    assert sample_ratio_p((51_000, 49_000)) < 1e-3
    assert sample_ratio_p((900, 100), (0.9, 0.1)) == pytest.approx(1.0)
    assert sample_ratio_p((0, 0)) == 1.0


def test_sample_ratio_alarms_seldom_when_nothing_is_wrong():
    """3,000 fair splits of 100,000 units: at most 12 alarms at p < 0.001 (99.99 % of runs)."""
    drawn = np.random.default_rng(0)
    counts, times = np.unique(drawn.binomial(100_000, 0.5, 3_000), return_counts=True)
    alarms = [sample_ratio_p((int(c), 100_000 - int(c))) < 1e-3 for c in counts]
    assert times[alarms].sum() <= 12
