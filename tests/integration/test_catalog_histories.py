"""The campaign's checker of catalogue histories finds every guarantee that is broken, and only
those.
"""

import itertools
import random

import pytest

from benchmarks.campaign.catalog_bundles import Entry, judged_by_items
from benchmarks.campaign.catalog_histories import (
    CODES,
    END,
    HIDDEN,
    ORACLE,
    POSITION,
    STALE,
    STATE,
    Operation,
    Result,
    Version,
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


B1, B2 = "one", "two"
# Puts of one item in bundle one, and when bundle two has taken them over.
ENTRIES = {
    1: Entry(B1),
    2: Entry(B2, assigned=1),
    3: Entry(B1),
    4: Entry(B1, rollback=True),
    5: Entry(B2, assigned=4),
    6: Entry(B2),
    7: Entry(B1, assigned=6),
}


def of_bundle(bundle, number, began, **fields):
    version = Version(bundle, 9, number)
    return Operation(0, 0, "read", began, began + 0.5, Result.OK, version=version, **fields)


def during_a_rollout(*reads):
    """What the checker finds in puts of `a`, a rollback to the first one, and reads."""
    writes = [
        of_bundle(B1, 1, 1, writes={"a": "first"}),
        of_bundle(B1, 3, 3, writes={"a": "third"}),
        of_bundle(B1, 4, 4, restores=Version(B1, 9, 2)),
        of_bundle(B2, 6, 6, writes={"a": "sixth"}),
    ]
    operations, log = judged_by_items([*writes, *reads], ENTRIES)
    report = check_history(operations, {"a": HIDDEN}, log=log)
    assert report.unasked == 0
    return {kind for kind, texts in report.violations.items() if texts}


def test_a_bundle_shows_a_change_of_another_one_from_its_assignment_on():
    shown = {
        B1: [HIDDEN, "first", "first", "third", "first", "first", "first", "sixth"],
        B2: [HIDDEN, HIDDEN, "first", "first", "first", "first", "sixth", "sixth"],
    }
    for bundle, values in shown.items():
        for number, value in enumerate(values):
            read = of_bundle(bundle, number, number + 0.6, seen={"a": value})
            assert not during_a_rollout(read), (bundle, number)
            for wrong in {HIDDEN, "first", "third", "sixth"} - {value}:
                found = during_a_rollout(of_bundle(bundle, number, number + 0.6, seen={"a": wrong}))
                assert STATE in found, (bundle, number, wrong)


def test_a_bundle_has_one_semantic_id_for_a_write_until_a_rollback_of_another_one():
    ids = {"seen": {"a": "first"}, "codes": {"a": (1,)}}
    other = {"seen": {"a": "first"}, "codes": {"a": (2,)}}
    for numbers, found in (((2, 3), {CODES}), ((2, 5), set())):
        reads = [of_bundle(B2, numbers[0], 2.6, **ids), of_bundle(B2, numbers[1], 5.6, **other)]
        assert during_a_rollout(*reads) == found


def test_a_version_that_a_request_names_is_there_with_its_items():
    for number, found in ((3, {STALE}), (4, {STALE}), (5, set())):
        read = of_bundle(B2, number, 5.6, seen={"a": "first"}, at_least=Version(B1, 9, 3))
        assert during_a_rollout(read) == found
