"""Confidence sequences: the published boundary, coverage at every look, stopping."""

import math

import numpy as np
import pytest

from recserve.experiments.statistics import (
    FIRST_LOOK,
    MAX_LOOKS,
    Observations,
    boundary,
    confidence_sequence,
    stopping_block,
    stopping_looks,
    time_blocks,
    tuned_rho,
)

# A/A runs, and the most alarms of them: more have a probability below 0.5 % where 5 % alarm.
MANY = pytest.param(150, 15, marks=pytest.mark.slow)


def experiment(drawn, effect=0.0, size=2000, num_blocks=50):
    treated = drawn.random(size) < 0.5
    values = np.exp(drawn.normal(0, 0.3, size))
    values[treated] *= 1 + effect
    return Observations(values, treated, time_blocks(np.arange(size), num_blocks))


def test_the_boundary_is_the_published_one():
    """Equation of theorem 2.2, divided by sigma / sqrt(t): t = 100, rho = 0.3, alpha = 0.05."""
    t, rho, alpha = 100, 0.3, 0.05
    inside = 2 * (t * rho**2 + 1) / (t**2 * rho**2) * math.log(math.sqrt(t * rho**2 + 1) / alpha)
    assert boundary(t, rho, alpha) == pytest.approx(math.sqrt(inside) * math.sqrt(t))


def test_the_sequence_is_tightest_where_it_was_tuned():
    rho = tuned_rho(100)
    widths = {t: boundary(t, rho) for t in (25, 50, 100, 200, 400)}
    other = [boundary(100, tuned_rho(t)) for t in (10, 30, 300, 1000)]
    assert all(widths[100] < width for width in other)
    assert 2.5 < widths[100] < 3.2


@pytest.mark.parametrize(("runs", "most"), [(30, 4), MANY])
def test_looking_again_and_again_alarms_in_at_most_five_per_cent(runs, most):
    """A/A runs with about 40 looks; a fixed interval at every look would alarm far more often."""
    drawn = np.random.default_rng(1)
    alarms = naive = 0
    for _ in range(runs):
        looks = confidence_sequence(experiment(drawn), "mean")
        alarms += stopping_block(looks) is not None
        naive += any(look.fixed.excludes_zero for look in looks)
    assert alarms <= most < naive


def test_a_large_effect_stops_the_run_early():
    looks = confidence_sequence(experiment(np.random.default_rng(2), effect=0.3), "p50")
    stop = stopping_block(looks)
    assert stop is not None and stop < 50
    assert looks[-1].relative.low < 0.3 < looks[-1].relative.high


def test_looks_are_limited_and_end_with_the_last_block():
    looks = confidence_sequence(
        experiment(np.random.default_rng(3), size=4000, num_blocks=200), "mean"
    )
    assert len(looks) <= MAX_LOOKS + 2
    assert looks[0].num_blocks == FIRST_LOOK and looks[-1].num_blocks == 200
    assert looks[-1].share == 1.0
    assert all(
        look.relative.low <= look.fixed.low and look.relative.high >= look.fixed.high
        for look in looks
    )


@pytest.mark.parametrize("total", [2, 9, 10, 11, 50, 51, 90, 91])
def test_runs_of_any_length_have_a_look_at_their_end(total):
    observed = experiment(np.random.default_rng(total), size=20 * total, num_blocks=total)
    seen = [look.num_blocks for look in confidence_sequence(observed, "mean")]
    assert seen[0] == min(FIRST_LOOK, total) and seen[-1] == total
    assert seen == sorted(set(seen)) and len(seen) <= MAX_LOOKS + 1
    assert len(seen) == total - seen[0] + 1 or len(seen) > MAX_LOOKS / 2


def test_a_plan_of_more_blocks_widens_early_looks():
    observed = experiment(np.random.default_rng(4))
    assert confidence_sequence(observed, "mean", planned_blocks=500)[-1].share == 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "most"), [(40, 6), MANY])
def test_a_run_that_may_stop_early_seldom_stops_without_a_difference(runs, most):
    drawn, stopped, planned = np.random.default_rng(11), 0, 60
    for _ in range(runs):
        values = drawn.lognormal(3, 0.6, size=planned * 40)
        observed = Observations(
            values=values,
            treated=drawn.permuted(np.tile([True, False], (planned, 20)), axis=1).ravel(),
            blocks=np.repeat(np.arange(planned), 40),
        )
        looks = stopping_looks(observed, "p50", planned, 0.05)
        stopped += looks[-1].relative.excludes_zero
    assert stopped <= most


def test_a_difference_stops_a_run_and_ends_the_looks():
    drawn, planned = np.random.default_rng(12), 60
    treated = np.tile([True, False], planned * 20)
    values = drawn.lognormal(3, 0.6, size=planned * 40) * np.where(treated, 1.5, 1.0)
    observed = Observations(values, treated, np.repeat(np.arange(planned), 40))
    looks = stopping_looks(observed, "p50", planned, 0.05)
    assert looks[-1].relative.excludes_zero and looks[-1].num_blocks < planned
    assert not any(look.relative.excludes_zero for look in looks[:-1])
