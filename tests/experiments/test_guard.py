"""Guards and tallies: when an arm stops, and when it does not."""

import math
import random
from statistics import NormalDist

import numpy as np
import pytest

from recserve.experiments.experiment import Experiment
from recserve.experiments.latencies import ERROR, NUM_LATENCIES, bucket, percentile
from recserve.experiments.settings import nest_fields, parse_experiments
from recserve.experiments.tallies import ArmResult, Window
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


def counted(values):
    return np.bincount([bucket(value) for value in values], minlength=NUM_LATENCIES)


def by_order(ordered, share, confidence):
    """The percentile and its interval of sorted values themselves: the ranks of `percentile`."""
    count = len(ordered)
    spread = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread) - 1, math.ceil(count * share + spread)
    return (
        ordered[min(count - 1, math.ceil(count * share) - 1)],
        ordered[low] if low >= 0 else None,
        ordered[high] if high < count else None,
    )


@pytest.mark.parametrize("seed", range(20))
def test_percentiles_of_parts_are_those_of_the_values_within_the_error(seed):
    """Parts of a run are added; the values are anything from microseconds to an hour."""
    drawn = np.random.default_rng(seed)
    values = np.exp(drawn.normal(drawn.uniform(-9, 5), drawn.uniform(0.01, 1.5), 3000))
    values = np.clip(values[: int(drawn.integers(1, 3000))], 1e-5, 3600)
    parts = np.array_split(values, int(drawn.integers(1, 5)))
    found = sum(counted(part) for part in parts)
    for share, confidence in ((0.5, 0.95), (0.99, 0.95), (0.99, 0.98)):
        value, low, high = by_order(np.sort(values), share, confidence)
        said = percentile(found, share, confidence)
        assert said.value == pytest.approx(value, rel=1.001 * ERROR)
        assert (said.low is None, said.high is None) == (low is None, high is None)
        # An end is at most one bucket farther out, and never farther in.
        assert low is None or low * (1 - 2.1 * ERROR) <= said.low <= low
        assert high is None or high <= said.high <= high * (1 + 2.1 * ERROR)
    assert percentile(np.zeros(NUM_LATENCIES, np.int64), 0.99, 0.95) is None


def test_the_interval_covers_the_percentile():
    drawn, covered = np.random.default_rng(3), 0
    for _ in range(400):
        found = percentile(counted(drawn.random(2000)), 0.99, 0.95)
        covered += found.low <= 0.99 <= found.high
    assert covered >= 370


@pytest.mark.parametrize("seed", range(12))
def test_verdicts_on_latency_are_those_of_the_values_beyond_the_error(clock, seed):
    """Runs near the bound: the sums decide as the sorted latencies, unless these are within it."""
    drawn = np.random.default_rng(seed)
    one = experiment(clock, window_s=80_000, p99_factor=1.5)
    factor, spread = drawn.uniform(1.3, 1.9), drawn.uniform(0.1, 1.0)
    times = {name: np.exp(drawn.normal(-4, spread, 800)) for name in "abc"}
    times["b"] *= factor
    for number in range(800):
        clock.now += 0.05
        for arm in one.arms:
            one.record(arm, ArmResult(float(times[arm.name][number])))
    said = {g.name: g.result for g in one.describe().arms[1].verdict.guardrails}["p99"]
    base = by_order(np.sort(times["a"]), 0.99, 0.99)[0]
    low = by_order(np.sort(times["b"]), 0.99, 0.98)[1]
    margin = low / (1.5 * base) - 1
    if abs(margin) > 3.1 * ERROR:
        assert said == ("fails" if margin > 0 else "holds")


def test_a_window_holds_the_sums_of_its_last_slices():
    window, drawn, seen = Window(100.0, 1), random.Random(4), []
    for _ in range(2000):
        now_s = (seen[-1] if seen else 0.0) + drawn.expovariate(1.0)
        window.current(now_s)[0] += 1
        seen.append(now_s)
        inside = [sum(now_s - at < length for at in seen) for length in (95.0, 100.0)]
        assert inside[0] <= window.sums(now_s)[0] <= inside[1]
    assert len(window._slices) <= 20
    assert window.sums(seen[-1] + 101.0)[0] == 0


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
    assert sum(one.division()[0]) == 3000
    assert one.describe().sample_ratio_p > 0.001
    for n in range(3000, 3400):
        one.see(f"user-{n}", "a")
    assert one.describe().sample_ratio_p < 0.001
