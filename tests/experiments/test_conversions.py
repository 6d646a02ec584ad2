"""Rates of clicks in two arms: variance, intervals at every look, the length of a run."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.experiments.click_power import WORLDS, simulate
from recserve.experiments.conversions import (
    MIN_BUCKETS,
    MIN_EVENTS,
    NUM_BUCKETS,
    RateSums,
    compare_rates,
    compare_teams,
    half_width,
    information_of_width,
    needed_information,
    plan_experiment,
)
from tests.support.grids import chosen

# Answers and clicks of 400 users, who are in the control and the treatment by turns. tea-tasting
# 1.14.0, `RatioOfMeans("clicks", "answers", use_t=False)`, gives the values below for them.
ANSWERS = (
    "22745561424851527885732546837237264587758822357483856257878274631188342276125882"
    "51224364386663813218147671412715138331724117144266828125786147526161338664378223"
    "43483853847386811154822736351686875842562264476827511362582282737167362214512532"
    "11617536234623122384185111856848467167864274713756577763173212143453556512753386"
    "33276465567543382153156142577736686713367346242268266665172485313577266744485158"
)
CLICKS = (
    "00100200000100201000000110000000001012121000011020010000300000000010000000001210"
    "01011010000101000001010320200002004000000000001000203010101010200000010100001002"
    "20010010002001000000000100100012000200000000122102200011000010010000000003000010"
    "00100100000000000031003000311000002012100010200210001140010100001101022000120120"
    "01000020210111000000001000200001100100000020010001001120000010001201110001030101"
)
CONTROL, TREATMENT = 0.11123110151187905, 0.09313154831199069
ENDS = (-0.04972541597760225, 0.01352630957782553)  # of the 95 % interval of the difference

SHORT = {world.name: world for world in (*WORLDS[:4], WORLDS[-1])}


def sums(answers, clicks):
    """Sums of users with one group each."""
    padded = [np.zeros(NUM_BUCKETS, np.int64) for _ in range(2)]
    for values, whole in zip((answers, clicks), padded, strict=True):
        whole[: len(values)] = values
    return RateSums(*padded)


def test_rates_and_their_error_are_those_of_an_independent_library():
    answers, clicks = (np.array([int(digit) for digit in text]) for text in (ANSWERS, CLICKS))
    control, treatment = (sums(answers[half::2], clicks[half::2]) for half in (0, 1))
    assert (control.rate, treatment.rate) == pytest.approx((CONTROL, TREATMENT), rel=1e-12)
    error = math.sqrt(sum(one.variance() / one.num_answers**2 for one in (control, treatment)))
    low, high = ENDS
    assert error == pytest.approx((high - low) / 2 / stats.norm.ppf(0.975), rel=1e-9)
    found = compare_rates(control, treatment, 0.1)
    assert found.difference == pytest.approx((low + high) / 2, rel=1e-9)
    # Half an event is added to each variance here.
    together = clicks.sum() / answers.sum()
    assert found.information == pytest.approx((together / error) ** 2, rel=0.02)
    assert found.reach > 1.96 * error


def test_groups_of_users_give_the_variance_that_users_give():
    """The bootstrap of users is the oracle; clicks of a user depend on each other."""
    drawn = np.random.default_rng(4)
    users = 8000
    answers = drawn.poisson(drawn.lognormal(1.0, 1.0, users)) + 1
    clicks = drawn.binomial(answers, drawn.beta(0.5, 4.5, users))
    group = drawn.integers(0, NUM_BUCKETS, users)
    found = RateSums(
        *(np.bincount(group, values, NUM_BUCKETS).astype(np.int64) for values in (answers, clicks))
    )
    picks = drawn.integers(0, users, (600, users))
    rates = clicks[picks].sum(1) / answers[picks].sum(1)
    error = math.sqrt(found.variance()) / found.num_answers
    assert error == pytest.approx(rates.std(), rel=0.12)
    independent = math.sqrt(found.rate * (1 - found.rate) / found.num_answers)
    assert error > 1.3 * independent  # what single answers as units would say
    assert found.spread() > 1.7


def test_teams_of_the_same_answers_have_the_error_of_their_difference():
    """The bootstrap of users is the oracle. Users who click much click on items of both teams."""
    drawn = np.random.default_rng(5)
    users = 8000
    answers = drawn.poisson(drawn.lognormal(1.0, 1.0, users)) + 1
    readiness = drawn.beta(0.5, 4.5, users)
    first, second = (drawn.binomial(answers, share * readiness) for share in (0.9, 1.0))
    group = drawn.integers(0, NUM_BUCKETS, users)
    control, treatment = (
        RateSums(
            *(np.bincount(group, each, NUM_BUCKETS).astype(np.int64) for each in (answers, clicks))
        )
        for clicks in (first, second)
    )
    found = compare_teams(control, treatment, 0.1)
    assert found.difference == pytest.approx(treatment.rate - control.rate)
    picks = drawn.integers(0, users, (600, users))
    ahead = (second - first)[picks].sum(1) / answers[picks].sum(1)
    together = (control.rate + treatment.rate) / 2
    assert together / math.sqrt(found.information) == pytest.approx(ahead.std(), rel=0.12)
    apart = compare_rates(control, treatment, 0.1)  # what two groups of users would say
    assert found.reach < 0.9 * apart.reach


@pytest.mark.parametrize("few", ["events", "users"])
def test_too_few_events_or_users_give_no_interval(few):
    users = MIN_BUCKETS - 1 if few == "users" else 500
    per_user = 10 if few == "users" else 0
    clicks = np.full(users, per_user)
    clicks[0] += MIN_EVENTS // 2 - 1
    one = sums(np.full(users, 50), clicks)
    assert compare_rates(one, one, 0.1) is None and one.spread() is None
    assert compare_teams(one, one, 0.1) is None


def test_an_arm_without_clicks_is_compared():
    drawn = np.random.default_rng(0)
    answers = np.full(300, 4)
    control = sums(answers, drawn.binomial(answers, 0.2))
    found = compare_rates(control, sums(answers, 0 * answers), 0.1)
    assert found.difference == -control.rate and found.relative[0] == -1
    assert found.excludes_zero
    back = compare_rates(sums(answers, 0 * answers), control, 0.1)
    assert back.excludes_zero and back.relative == (math.inf,) * 3


@pytest.mark.parametrize("smallest", [0.02, 0.1, 1.0])
def test_the_interval_is_narrow_from_a_large_loss_to_the_smallest_effect(smallest):
    planned = needed_information(smallest)
    parts = (0.01, 0.05, 0.1, 0.2, 1)
    errors = [half_width(planned * part, smallest) * math.sqrt(planned * part) for part in parts]
    assert min(errors) == errors[2] > 1.96
    assert errors[4] < 1.08 * errors[2]
    width = half_width(3 * planned, smallest)
    assert information_of_width(width, smallest) == pytest.approx(3 * planned, rel=1e-6)


@pytest.mark.parametrize("world", chosen(SHORT, WORLDS[0].name, WORLDS[-1].name))
def test_looking_all_the_time_alarms_in_at_most_five_per_cent(world):
    """40 A/A runs: more than 6 alarms have a probability of 0.3 % where 5 % alarm."""
    drawn = np.random.default_rng(7)
    runs = [simulate(world, 1.0, 5000, 0.5, drawn) for _ in range(40)]
    assert sum(one.change is not None for one in runs) <= 6


@pytest.mark.parametrize("world", [WORLDS[0], WORLDS[-1]], ids=lambda world: world.name)
def test_half_the_clicks_are_found(world):
    drawn = np.random.default_rng(8)
    runs = [simulate(world, 0.5, 8000, 0.1, drawn) for _ in range(10)]
    assert all(one.change is not None and one.change < 0 for one in runs)


def test_a_plan_follows_from_rate_effect_and_traffic():
    plan = plan_experiment(0.1, 0.1, 10_000)
    assert plan.days == pytest.approx(plan.answers / 10_000)
    assert plan.events == pytest.approx(plan.answers / 10)
    # A fixed sample with one look needs (1.96 + 0.84)^2 (1/c + 1/t) / log(1.1)^2 clicks.
    fixed = 4 * (1.95996 + 0.84162) ** 2 / math.log(1.1) ** 2
    assert 1.5 < plan.events / fixed < 2.5  # the price of looking at any time
    assert plan_experiment(0.1, 0.1, 10_000, coverage=0.5).days == pytest.approx(2 * plan.days)
    assert plan_experiment(0.1, 0.1, 10_000, spread=1.5).days == pytest.approx(1.5 * plan.days)
    assert plan_experiment(0.1, 0.2, 10_000).days < 0.3 * plan.days
    assert plan_experiment(0.1, 0.1, 10_000, weights=(0.9, 0.1)).days > 2 * plan.days
    assert plan_experiment(0.1, 0.1, 10_000, weights=(1 / 3,) * 3).days > 1.5 * plan.days
    assert plan_experiment(0.1, 0.1, 10_000, power=0.9).days > 1.1 * plan.days


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rate": 0.0}, "rate: expected more than 0, got 0"),
        ({"smallest": -0.1}, "smallest effect: expected more than 0, got -0.1"),
        ({"answers_per_day": math.inf}, "answers per day: expected more than 0, got inf"),
        ({"coverage": 1.5}, "coverage: expected more than 0 and at most 1, got 1.5"),
        ({"spread": math.nan}, "spread: expected more than 0, got nan"),
        ({"rate": 1e-300, "answers_per_day": 1e-300}, "would never end; expected a larger rate"),
        ({"coverage": 1e-300, "answers_per_day": 1e-300}, "would never end; expected a larger"),
        ({"smallest": 1e-160}, "would never end; expected a larger rate"),
        ({"power": 1.0}, "power: expected more than 0 and less than 1, got 1"),
        ({"weights": (0.5, 0.6)}, "weights: expected two or more shares with sum 1"),
    ],
)
def test_a_plan_refuses_wrong_numbers(change, words):
    with pytest.raises(ValueError, match=words):
        plan_experiment(**{"rate": 0.1, "smallest": 0.1, "answers_per_day": 100.0, **change})
