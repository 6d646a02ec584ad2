"""The campaign's checker of catalogue histories finds every guarantee that is broken, and only
those.
"""

import itertools
import random

import pytest

from benchmarks.campaign.catalog_histories import (
    CODES,
    END,
    ORACLE,
    POSITION,
    STALE,
    STATE,
    check_history,
)
from benchmarks.campaign.linearizability import NEVER, Call, first_unexplained
from tests.support.simulated_fleet import (
    INITIAL,
    MISTAKES,
    NO_CONDITION,
    NO_EPOCH,
    OWN_IDS,
    STALE_READS,
    TRIM_EARLY,
    Fleet,
)

SEEDS = range(6)
SYMPTOMS = {
    NO_CONDITION: {POSITION, ORACLE},
    NO_EPOCH: {POSITION, STATE},
    TRIM_EARLY: {STATE, END},
    OWN_IDS: {CODES, END},
    STALE_READS: {STALE, ORACLE},
}


def checked(seed, mistake="", failovers=False):
    fleet = Fleet(seed, mistake, failovers)
    ends = fleet.run()
    return fleet, check_history(fleet.operations, INITIAL, ends)


@pytest.mark.parametrize("failovers", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_correct_fleet_passes(seed, failovers):
    """Nothing is found, and exactly the acknowledged writes that a failover dropped are lost."""
    fleet, report = checked(seed, failovers=failovers)
    assert not report.count(), report.violations
    assert len(report.lost) == fleet.num_lost
    assert report.unasked == 0
    assert (fleet.num_lost > 0) <= failovers


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_broken_guarantee_is_found(seed, mistake):
    _, report = checked(seed, mistake, failovers=mistake == NO_EPOCH)
    found = {kind for kind, texts in report.violations.items() if texts}
    assert found & SYMPTOMS[mistake], found


def by_brute_force(calls, initial):
    """Whether an order of all ended calls and some others explains all reads."""
    ended = [one for one in calls if one.ended < NEVER]
    others = [one for one in calls if one.ended == NEVER]
    for count in range(len(others) + 1):
        for some in itertools.combinations(others, count):
            for order in itertools.permutations([*ended, *some]):
                pairs = itertools.combinations(order, 2)
                if all(two.ended >= one.began for one, two in pairs) and explains(order, initial):
                    return True
    return False


def explains(order, initial):
    state = frozenset({initial})
    for one in order:
        if one.read is not None and one.read not in state:
            return False
        state = frozenset({one.read}) if one.read is not None else one.written
    return True


def test_linearizability_is_that_of_all_orders():
    """The search agrees with trying every order, for drawn histories of up to six calls."""
    draw, verdicts = random.Random(4), []
    for _ in range(400):
        calls = []
        for _ in range(draw.randrange(1, 7)):
            began = draw.randrange(12)
            ended = began + draw.randrange(1, 6)
            if draw.random() < 0.5:
                calls.append(Call(began, ended, draw.choice("abc")))
            else:
                values = frozenset(draw.sample("abc", draw.choice((1, 1, 1, 2))))
                calls.append(Call(began, draw.choice((ended, ended, NEVER)), written=values))
        verdicts.append(by_brute_force(calls, "a"))
        assert (first_unexplained(calls, "a") is None) == verdicts[-1], calls
    assert 50 < sum(verdicts) < 350
