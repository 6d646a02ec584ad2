"""The simulated day: traffic of one replica, its queue and cache, the number of replicas."""

import json
import math
from collections import OrderedDict

import numpy as np
import pytest

from benchmarks.scale import day
from benchmarks.scale.replica import ReplicaShape, SimulatedReplica, StepCosts
from benchmarks.scale.traffic import HOUR_S, Arrivals, ReplicaTraffic, Traffic

SMALL = Traffic(peak_rate=2000.0, num_users=200_000, offset=100.0)
FEWEST = 20


def arrivals(times, users):
    count = len(times)
    return Arrivals(np.array(times, float), np.array(users), np.zeros(count), np.zeros(count, bool))


def expected_requests(hours):
    steps = np.arange(0, hours * HOUR_S, 60) + 30
    return sum(SMALL.rate(t) * 60 for t in steps) / FEWEST


@pytest.mark.slow
@pytest.mark.parametrize("affinity", [True, False])
def test_replicas_get_their_share_of_the_requests(affinity):
    """Sessions of eight requests vary more than single requests; the bound is six deviations."""
    drawn = [
        sum(
            part.times_s.size
            for part in ReplicaTraffic(SMALL, FEWEST, affinity, np.random.default_rng(n)).hours(2)
        )
        for n in range(8)
    ]
    expected = expected_requests(2)
    # The last sessions of an affine replica end after the second hour; users differ in activity.
    tolerance = 6 * math.sqrt(15 * expected / 8) + 0.08 * expected
    assert abs(np.mean(drawn) - expected) < tolerance


@pytest.mark.parametrize("affinity", [True, False])
def test_hours_follow_each_other_and_users_keep_their_claims(affinity):
    traffic = ReplicaTraffic(SMALL, FEWEST, affinity, np.random.default_rng(0))
    claims: dict[int, float] = {}
    for hour, part in enumerate(traffic.hours(3)):
        assert (np.diff(part.times_s) >= 0).all()
        # A request may come half a minute early, because rates are constant within a minute.
        assert (
            part.times_s[0] >= (hour * HOUR_S if hour else 0)
            and part.times_s.max() < (hour + 1) * HOUR_S
        )
        assert (part.claims >= 0).all() and (part.claims < 1 / FEWEST).all()
        assert (part.users >= 0).all() and (part.users < SMALL.num_users).all()
        for user, claim in zip(part.users.tolist(), part.claims.tolist(), strict=True):
            if affinity:
                assert claims.setdefault(user, claim) == claim


def test_weights_of_all_users_add_up_to_one():
    users = np.arange(SMALL.num_users)
    assert SMALL.weight(users).sum() == pytest.approx(1, rel=0.01)
    drawn = SMALL.draw_users(100_000, np.random.default_rng(0))
    head = SMALL.weight(users[:1000]).sum()
    assert (drawn < 1000).mean() == pytest.approx(head, abs=0.01)


def test_single_requests_wait_as_queueing_theory_says():
    """Poisson arrivals and constant service, one at a time: the Pollaczek-Khinchine mean."""
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(0.01, 200_000))
    shape = ReplicaShape(StepCosts(0.0, 6.0, 6.0, 6.0), 10, max_batch=1, deadline_s=60)
    done = SimulatedReplica(shape).serve(arrivals(times, np.zeros(times.size, int)))
    assert done.refused == 0
    assert done.latencies_s.mean() == pytest.approx(0.006 + 0.6 * 0.006 / (2 * 0.4), rel=0.03)
    assert done.busy_s == pytest.approx(0.006 * times.size)


def test_the_cache_drops_the_user_who_was_away_longest():
    rng = np.random.default_rng(2)
    users = rng.integers(0, 30, 5000)
    shape = ReplicaShape(StepCosts(0.0, 1.0, 1.0, 2.0), 10, max_batch=1, deadline_s=1e9)
    done = SimulatedReplica(shape).serve(arrivals(np.arange(5000.0), users))
    seen: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for user in users.tolist():
        hits += user in seen
        seen.pop(user, None)
        seen[user] = None
        while len(seen) > 10:
            seen.popitem(last=False)
    assert done.hits == hits and 0.2 < hits / 5000 < 0.45
    assert done.busy_s == pytest.approx((2 * 5000 - hits) / 1e3)


def test_waiting_requests_share_a_batch_and_late_ones_are_refused():
    shape = ReplicaShape(StepCosts(10.0, 0.0, 0.0, 1.0), 100, max_batch=2, deadline_s=0.015)
    # The first is alone; then two, then two more; the sixth has waited longer than 15 ms.
    done = SimulatedReplica(shape).serve(arrivals([0, 0.001, 0.001, 0.009, 0.009, 0.009], range(6)))
    expected = [0.011, 0.022, 0.022, 0.026, 0.026]
    assert done.latencies_s == pytest.approx(expected) and done.refused == 1


def test_replicas_start_late_and_stop_after_five_quiet_minutes():
    fleet = day.Fleet(day.Scaling(target=0.5, start_s=120), 10, 2)
    fleet.observe(0, 10, 0.75)
    assert [fleet.serving(t) for t in (60, 119, 120)] == [10, 10, 15]
    for minute in range(5):
        assert fleet.running == 15
        fleet.observe(180 + 60 * minute, 15, 0.2)
    assert fleet.running == 6
    fleet.observe(600, 6, 0.52)
    assert fleet.running == 6, "within the tolerance"


def test_an_outage_takes_its_share_until_the_successors_serve():
    fleet = day.Fleet(day.Scaling(start_s=60, outage_share=0.25, outage_s=100), 8, 2)
    assert [fleet.serving(t) for t in (99, 100, 159, 160)] == [8, 6, 6, 8]


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path, capsys):
    path = tmp_path / "day.json"
    how = ["--rate", "3000", "--users", "500000", "--hours", "2", "--cached-users", "4000"]
    assert day.main([*how, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["settings"]["shape"]["cached_users"] == 4000
    for rows in found["hours"].values():
        assert [row["hour"] for row in rows] == [0, 1]
        for row in rows:
            assert row["refused_share"] < 0.5 and row["requests"] > 1000
    totals = {name: sum(row["replicas"] for row in rows) for name, rows in found["hours"].items()}
    hits = {name: rows[1]["hit_share"] for name, rows in found["hours"].items()}
    assert hits["affinity"] > hits["random"] + 0.3
    assert totals["affinity"] < totals["random"]
    printed = capsys.readouterr().out
    assert f"affinity: {totals['affinity']:,.0f} replica hours" in printed
