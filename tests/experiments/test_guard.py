"""Guards and tallies: when an arm stops, and when it does not."""

import random

import numpy as np
import pytest

from recserve.experiments.experiment import Experiment
from recserve.experiments.settings import nest_fields, parse_experiments
from recserve.experiments.tallies import ArmResult, ArmTally, percentile
from recserve.schemas.items import InvalidRequest, RecommendRequest

GUARD = {"window_s": 100, "min_requests": 100, "p99_factor": 1.5}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def experiment(clock, **guard):
    (settings,) = parse_experiments(
        [
            {
                "name": "x",
                "use": "recommend",
                "guard": {**GUARD, **guard},
                "arms": [{"name": "a"}, {"name": "b"}, {"name": "c"}],
            }
        ]
    )
    return Experiment(settings, clock)


def feed(one, clock, draw, count=1000, step=0.05):
    """Records `count` results of each arm, as `draw(arm)` returns them."""
    for _ in range(count):
        clock.now += step
        for arm in one.arms:
            one.record(arm, draw(arm.name))


def test_equal_arms_go_on(clock):
    drawn = random.Random(1)
    one = experiment(clock)
    feed(one, clock, lambda _: ArmResult(drawn.lognormvariate(-4, 1), drawn.random() < 0.02), 6000)
    assert one.status == "running" and one.reason is None


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (ArmResult(None, failed=True), "errors"),
        (ArmResult(0.01, empty=True), "empty"),
        (ArmResult(0.5), "p99"),
    ],
)
def test_a_bad_arm_stops_after_enough_requests(clock, result, cause):
    one = experiment(clock)
    good = ArmResult(0.01)
    feed(one, clock, lambda arm: result if arm == "b" else good, 90)
    assert one.status == "running"
    feed(one, clock, lambda arm: result if arm == "b" else good, 60)
    assert one.status == "fallen_back" and one.reason.startswith("arm b: ")
    assert one.fallbacks[cause] == 1 and sum(one.fallbacks.values()) == 1


def test_errors_of_all_arms_stop_nothing(clock):
    drawn = random.Random(2)
    one = experiment(clock)
    feed(one, clock, lambda _: ArmResult(None if (bad := drawn.random() < 0.3) else 0.01, bad))
    assert one.status == "running"


def test_the_window_forgets(clock):
    one = experiment(clock)
    feed(one, clock, lambda arm: ArmResult(None if arm == "b" else 0.01, arm == "b"), 60)
    clock.now += 200
    feed(one, clock, lambda _: ArmResult(0.01), 120)
    assert one.status == "running"
    assert one.describe().arms[1].errors == 60


def test_start_empties_the_windows(clock):
    one = experiment(clock)
    feed(one, clock, lambda arm: ArmResult(None if arm == "b" else 0.01, arm == "b"), 200)
    assert one.status == "fallen_back"
    one.start()
    feed(one, clock, lambda _: ArmResult(0.01), 500)
    assert one.status == "running" and one.describe().arms[1].requests == 700


def test_without_a_guard_nothing_falls_back(clock):
    raw = {"name": "x", "use": "rank", "guard": None, "arms": [{"name": "a"}, {"name": "b"}]}
    one = Experiment(parse_experiments([raw])[0], clock)
    feed(one, clock, lambda arm: ArmResult(None if arm == "b" else 0.01, arm == "b"))
    assert one.status == "running"


def test_a_percentile_has_an_interval_where_there_are_enough_values():
    values = np.arange(1.0, 1001.0)
    found = percentile(values, 0.99, 0.95)
    assert found.value == 990 and found.low <= 984 and found.high >= 996
    few = percentile(values[:50], 0.99, 0.95)
    assert few.value == 50 and few.high is None
    assert percentile(values[:0], 0.99, 0.95) is None


def test_the_interval_covers_the_percentile():
    drawn, covered = np.random.default_rng(3), 0
    for _ in range(400):
        found = percentile(np.sort(drawn.random(2000)), 0.99, 0.95)
        covered += found.low <= 0.99 <= found.high
    assert covered >= 370


def test_a_tally_is_bounded():
    tally = ArmTally(1e9)
    for n in range(12_000):
        tally.add(ArmResult(1.0), float(n))
    assert tally.requests == 12_000 and tally.window(0.0).requests == 10_000


def test_slates_that_are_shorter_than_a_quota_take_no_part():
    fields = {"diversity.at_least": {"count": 3, "new_within_s": 60}}
    arms = [{"name": "a"}, {"name": "b", "fields": fields}]
    (settings,) = parse_experiments([{"name": "x", "use": "recommend", "arms": arms}])
    one = Experiment(settings)
    for k, reason in ((2, "k is below the quota 3 of an arm"), (3, None)):
        assert one.exclusion.reason(RecommendRequest(history=[], k=k)) == reason


def test_dotted_names_nest():
    assert nest_fields({"a.b": 1, "a.c": 2, "d": {"e": 3}}) == {
        "a": {"b": 1, "c": 2},
        "d": {"e": 3},
    }
    for wrong in ({"a": 1, "a.b": 2}, {"a.b": 1, "a": 2}):
        with pytest.raises(InvalidRequest):
            nest_fields(wrong)


def test_units_are_counted_once_for_the_sample_ratio(clock):
    one = experiment(clock)
    for _ in range(5):
        for n in range(3000):
            one.see(f"user-{n}", one.split.assign(f"user-{n}").arm)
    assert sum(one._units_per_arm.values()) == 3000
    assert one.describe().sample_ratio_p > 0.001
    for n in range(3000, 3400):
        one.see(f"user-{n}", "a")
    assert one.describe().sample_ratio_p < 0.001
