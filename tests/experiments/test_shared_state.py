"""Several servers with one experiment: their sums are those of one process."""

import contextlib
import random
import time
from dataclasses import replace

import pytest

from recserve.experiments import shared_state
from recserve.experiments.experiment import Experiment
from recserve.experiments.settings import parse_experiments
from recserve.experiments.shared_state import LEASE_S
from recserve.experiments.tallies import NUM_SLICES, ArmResult, slice_ms
from recserve.features.redis_connection import connect
from recserve.features.shared_counts import CountsUnavailable, Layout, SharedCounts
from recserve.schemas.experiments import ExperimentNotSaved

GUARD = {"window_s": 300, "min_requests": 50}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Network:
    """A board behind a network that repeats calls, loses replies, and can be cut."""

    def __init__(self, board, drawn, faults):
        self.board, self.drawn, self.faults = board, drawn, faults
        self.cut, self.arrived = False, False
        self.clock = None  # whose time is that of the board

    def __getattr__(self, name):
        method = getattr(self.board, name)

        def call(*arguments, **named):
            self.arrived = False
            if self.cut or self.drawn.random() < self.faults:
                raise CountsUnavailable("not sent")
            found = method(*arguments, **named)
            self.arrived = True
            while self.drawn.random() < self.faults:
                found = method(*arguments, **named)
            if self.drawn.random() < self.faults:
                raise CountsUnavailable("the reply is lost")
            if self.clock is not None and hasattr(found, "time_ms"):
                found = replace(found, time_ms=10**12 + int(1e3 * self.clock()))
            return found

        return call if callable(method) and name != "close" else method


def settings_of(changes):
    plain = {"name": "fast", "use": "recommend", "guard": GUARD}
    arms = [{"name": "control"}, {"name": "rpg", "fields": {"strategy": "rpg"}}]
    (found,) = parse_experiments([{**plain, "arms": arms, **changes}])
    return found


@pytest.fixture
def new_server(empty_redis, redis_url):
    """Starts servers of one experiment."""
    started = []

    def start(drawn=None, faults=0.0, clock=None, **changes):
        one = Experiment(settings_of(changes), clock or Clock())
        counts, guard = one.counts, one.settings.guard
        window_s = 300.0 if guard is None else guard.window_s
        sizes = counts.values.size, counts.num_head, counts.num_window
        layout = Layout(*sizes, slice_ms(window_s), NUM_SLICES)
        board = SharedCounts(connect(redis_url), "test/fast", layout, f"server-{len(started)}")
        one.network = Network(board, drawn or random.Random(0), faults)
        one.share(one.network)
        started.append(board)
        return one

    yield start
    for board in started:
        board.close()


def told(one):
    """What a server says of an experiment, without what depends on the time of day."""
    found = one.describe()
    kinds = [arm.verdict and (arm.verdict.kind, arm.verdict.guardrails) for arm in found.arms]
    texts = [
        arm.verdict.text
        for arm in found.arms
        if arm.verdict is not None and arm.verdict.kind != "not_yet"
    ]
    arms = [
        (arm.name, arm.requests, arm.errors, arm.empty, arm.answers, arm.users, arm.goals)
        + (arm.p50_ms, arm.p99_ms, arm.p99_low_ms, arm.p99_high_ms)
        for arm in found.arms
    ]
    return found.status, found.sample_ratio_p, found.warning, arms, kinds, texts, one.compared


def do(one, call):
    name, *arguments = call
    arms = [one.arm(each) if each in ("control", "rpg") else each for each in arguments[:1]]
    getattr(one, name)(*(arms if name == "record" else arguments[:1]), *arguments[1:])


def exchange(one, pending, oracle):
    """Exchanges, and lets the oracle do what has arrived. Returns whether all of it has."""
    if one.shared._delta is None:
        one.in_delta = list(pending)
        pending.clear()
    with contextlib.suppress(CountsUnavailable):
        one.exchange()
    if one.shared._delta is None or one.network.arrived:
        for call in one.in_delta:
            do(oracle, call)
        one.in_delta.clear()
    return not one.in_delta and not pending and one.shared._delta is None


@pytest.mark.parametrize("mode", ["split", "interleaved"])
@pytest.mark.parametrize("seed", range(4))
def test_sums_of_servers_are_those_of_one_process(new_server, mode, seed):
    """Under lost replies, repeated calls, and servers that are killed and replaced."""
    drawn, faults = random.Random(seed), 0.2
    changes = {"mode": mode, "goals": ["click", "purchase"], "smallest_effect": 0.3}
    changes["guard"] = {**GUARD, "p99_factor": 1000}
    servers = [new_server(drawn, faults, **changes) for _ in range(3)]
    oracle = Experiment(settings_of(changes), Clock())
    pending = [[] for _ in servers]
    killed = 0
    for request in range(1500):
        number = drawn.randrange(3)
        one, mine = servers[number], pending[number]
        user = f"user-{drawn.randrange(200)}"
        arm = one.split.assign(user).arm
        calls = [("record", arm, ArmResult(drawn.lognormvariate(-4, 1), empty=request % 50 == 0))]
        if mode == "split":
            calls += [("see", user, arm), ("count_answer", [arm], user)]
        else:
            calls += [("count_answer", ["control", "rpg"], user), ("compare", "ab", "bc")]
        for call in calls:
            do(one, call)
        mine += calls
        for item in range(3):
            team = arm if mode == "split" else drawn.choice(["control", "rpg"])
            if drawn.random() < (0.1 if team == "control" else 0.3):
                event = (team, user, drawn.choice(["click", "purchase"]), f"{request} {item}")
                for other in (drawn.choice(servers), drawn.choice(servers)):  # it comes twice
                    while True:
                        try:
                            other.count_events([event])
                            break
                        except ExperimentNotSaved:
                            exchange(other, pending[servers.index(other)], oracle)
                oracle.count_events([event])
        if drawn.random() < 0.1:
            exchange(one, mine, oracle)
        if drawn.random() < 0.02:  # with what it has not sent
            mine.clear()
            servers[number], killed = new_server(drawn, faults, **changes), killed + 1
    for one, mine in zip(servers, pending, strict=True):
        one.network.faults = 0.0
        while not exchange(one, mine, oracle):
            pass
    assert killed > 3
    expected = told(oracle)
    for one in servers:
        one.exchange()
        assert told(one) == expected
    assert expected[3][0][1] > 100 and servers[0].describe().servers >= 3
    if mode == "split":
        servers[0].look()
        assert servers[1].describe().arms[1].first_verdict is not None


@pytest.mark.parametrize("seed", range(6))
def test_a_switch_is_on_all_servers_within_the_lease(new_server, seed):
    """Also on one that is cut off: it does not run what another one has stopped."""
    drawn, clock = random.Random(seed), Clock()
    servers = [new_server(drawn, clock=clock) for _ in range(3)]
    assert {one.status for one in servers} == {"unknown"}
    for one in servers:
        one.network.clock = clock
        one.exchange()
    state, since = "running", 0.0
    for _ in range(60):
        clock.now += drawn.uniform(0.1, 1.0)
        for one in servers:
            if drawn.random() < 0.15:
                one.network.cut = not one.network.cut
            if not one.network.cut and drawn.random() < 0.8:
                one.exchange()
        one = drawn.choice(servers)
        change = drawn.choice(["stop", "start", "nothing", "nothing"])
        if change != "nothing":
            before = state
            try:
                getattr(one, change)()
                state = "stopped" if change == "stop" else "running"
            except ExperimentNotSaved:
                if change == "stop":
                    assert one.status == "stopped"
                    one.network.cut = False
                    one.exchange()  # it goes on trying
                    state = "stopped"
            since = since if state == before else clock.now
        for one in servers:
            if state == "stopped" and clock.now >= since + LEASE_S:
                assert one.status != "running"
            if not one.network.cut:
                one.exchange()
                assert one.status == state
    for one in servers:
        one.network.cut = False
        one.exchange()
    assert {one.status for one in servers} == {state}


@pytest.mark.parametrize("started", ["before", "after"])
def test_a_stop_without_redis_yields_to_a_later_start(new_server, started):
    """And not to an earlier one, of which the server that was cut off does not know."""
    one, other = new_server(clock=time.monotonic), new_server(clock=time.monotonic)
    for each in (one, other):
        each.exchange()
    other.stop()
    one.exchange()
    one.network.cut = True
    if started == "before":
        other.start()
    time.sleep(0.01)
    with pytest.raises(ExperimentNotSaved, match="stopped on this server, and not on the others"):
        one.stop()
    assert (one.status, one.reason) == ("stopped", "stopped by an operator")
    time.sleep(0.01)
    if started == "after":
        other.start()
    one.network.cut = False
    for each in (one, other):
        each.exchange()
        assert each.status == ("stopped" if started == "before" else "running")


def test_a_damaged_state_is_a_stop_until_a_start(new_server, empty_redis):
    one, other = new_server(), new_server()
    for each in (one, other):
        each.exchange()
    meta = "recserve:counts:{test/fast}:meta"
    empty_redis.hset(meta, mapping={"version": 7, "state": b"\xff"})
    for each in (one, other):
        each.exchange()
        assert (each.status, each.reason) == ("stopped", shared_state.DAMAGED)
    other.start()
    one.exchange()
    assert one.status == "running"


def test_one_server_falls_back_and_all_follow(new_server):
    servers = [new_server() for _ in range(3)]
    for one in servers:
        one.exchange()
    for number in range(120):
        one = servers[number % 3]
        for arm in one.arms:
            one.record(arm, ArmResult(None if arm.name == "rpg" else 0.01, arm.name == "rpg"))
        if number % 10 == 9:
            for each in servers:
                each.exchange()
        if number == 39:
            assert {each.status for each in servers} == {"running"}  # no server has 50 requests
    for _ in range(2):
        for each in servers:
            each.exchange()
    assert {each.status for each in servers} == {"fallen_back"}
    assert [each.fallbacks["errors"] for each in servers] == [1, 1, 1]
    text = servers[2].describe().arms[1].verdict.text
    assert text.startswith("keep control: it fell back, error share 1.0000")
    servers[1].start()
    for each in servers:
        each.exchange()
        assert each.status == "running" and "fell back" not in each.describe().arms[1].verdict.text
        assert each.describe().arms[1].errors == 120
        for guard in each.describe().arms[1].verdict.guardrails:
            assert guard.result == "unclear"  # judged anew


def test_what_is_lost_is_told(new_server, empty_redis):
    """A killed server loses what it had not sent; a failover what it had not copied."""
    one, other = new_server(), new_server()
    for each in (one, other):
        each.exchange()
    good = ArmResult(0.01)
    one.record(one.control, good)
    one.exchange()
    saved = {key: empty_redis.dump(key) for key in empty_redis.scan_iter()}
    for _ in range(5):
        one.record(one.control, good)
    one.stop()
    one.exchange()
    assert (one.describe().uncounted, one.describe().arms[0].requests) == (0, 6)
    for key, value in saved.items():
        empty_redis.restore(key, 0, value, replace=True)
    other.exchange()
    assert other.status == "running"  # the failover has lost the stop, too
    one.record(one.control, good)
    one.exchange()
    other.exchange()
    assert {each.status for each in (one, other)} == {"stopped"}  # it came back
    found = other.describe()
    assert (found.uncounted, found.arms[0].requests) == (5, 2)
    name = ["redis", "recserve:counts:{test/fast}"][1] + ":writers"
    entry = empty_redis.hget(name, "server-0").split()
    empty_redis.hset(name, "server-0", b" ".join([entry[0], b"1000", *entry[2:]]))
    assert other.describe().uncounted == 5 + int(entry[2])  # it was killed: its largest delta
    assert other.describe().servers == 1


def traffic(servers, clicks, seed, requests):
    """Sends requests of users to drawn servers; yields every 50 of them."""
    drawn = random.Random(seed)
    for request in range(requests):
        one, user = drawn.choice(servers), f"user-{drawn.randrange(500)}"
        arm = one.split.assign(user).arm
        one.see(user, arm)
        one.record(one.arm(arm), ArmResult(0.01))
        one.count_answer([arm], user)
        events = [
            (arm, user, "click", f"{seed}-{request} {item}")
            for item in range(5)
            if drawn.random() < clicks[arm]
        ]
        if events:
            drawn.choice(servers).count_events(events)
        if request % 50 == 49:
            for each in servers:
                each.exchange()
            yield request


def test_half_the_clicks_are_seen_over_two_servers(new_server):
    """The walk of November 2026, 1,000 requests, which neither server could decide by itself."""
    servers = [new_server() for _ in range(2)]
    for each in servers:
        each.exchange()
    for _ in traffic(servers, {"control": 0.0848, "rpg": 0.0412}, 5, 1000):
        pass
    halves = [one.counts.results[:, 0].sum() for one in servers]
    assert min(halves) > 400
    for one in servers:
        assert one.describe().arms[1].verdict.kind == "keep_control"


def test_equal_arms_differ_at_no_look_over_two_servers(new_server, empty_redis):
    """A/A under continuous looks: at most one of 12 runs may show a difference (5 % do)."""
    shown = 0
    for seed in range(12):
        empty_redis.flushall()
        servers = [new_server() for _ in range(2)]
        for each in servers:
            each.exchange()
        looks = {
            servers[request // 50 % 2].describe().arms[1].verdict.kind
            for request in traffic(servers, {"control": 0.1, "rpg": 0.1}, seed, 1000)
        }
        shown += bool(looks & {"ship", "keep_control"})
    assert shown <= 1


def test_an_answer_makes_no_call(new_server, monkeypatch):
    """Nor does an event on a server that cannot reach Redis: it is refused at once."""
    clock = Clock()
    one = new_server(clock=clock)
    one.exchange()
    calls = []
    monkeypatch.setattr(one.network.board, "_client", None)
    monkeypatch.setattr(one.network, "board", None)
    one.see("ann", "rpg")
    one.record(one.arms[1], ArmResult(0.01))
    one.count_answer(["rpg"], "ann")
    assert one.status == "running" and not calls
    clock.now += LEASE_S
    assert one.status == "unknown"
    with pytest.raises(ExperimentNotSaved, match="are stored, but not counted .* event_id"):
        one.count_events([("rpg", "ann", "click", "token item")])
