"""Replicas with one experiment in Redis, clients that click, faults, a checker of the counts."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np

from benchmarks.campaign.catalog_fleet import Fleet
from benchmarks.campaign.fleet_faults import FaultyRedis, Plan, drive
from benchmarks.campaign.site import Site
from recserve.experiments.experiment import Experiment
from recserve.experiments.settings import parse_experiments
from recserve.experiments.shared_state import EVERY_S, LEASE_S
from recserve.experiments.tallies import user_group
from recserve.schemas.experiments import ExperimentsResponse
from recserve.server.experiments import open_board

NUM_REPLICAS, NUM_CLIENTS, NUM_USERS = 3, 8, 400
ADMIN = "an-admin-key-of-the-campaign"
BEARER = {"Authorization": f"Bearer {ADMIN}"}
SETTINGS: dict[str, Any] = {
    "name": "shared",
    "use": "recommend",
    "guard": None,
    "goals": ["click", "purchase"],
    "arms": [
        {"name": "control", "fields": {"strategy": "beam"}},
        {"name": "nezha", "fields": {"strategy": "nezha"}},
    ],
}
CLICKS = {"control": 0.15, "nezha": 0.35}  # chances of an item
TIMEOUT_S, PAUSE_S, SETTLE_S = 6.0, 0.05, 60.0
UNSENT_S = EVERY_S + 1.0  # an interval, and time for an exchange on a busy machine
# How long a replica may take between the state of its switch and the answer that it labels.
LABEL_S = 0.2

Group = tuple[str, int]  # an arm and a group of users


@dataclass(frozen=True)
class Answer:
    """An answer that a client got, or a request without one.

    Attributes:
        began, ended: time.monotonic() of the request.
        replica: The replica that was asked.
        user: The user.
        arm: The arm that it counts for; None if it takes no part; "?" without an answer.
    """

    began: float
    ended: float
    replica: int
    user: str
    arm: str | None


@dataclass(frozen=True)
class Switch:
    """A stop or a start.

    Attributes:
        running: Whether it starts.
        sent, acknowledged: time.monotonic() of the first request and the first acknowledgement.
    """

    running: bool
    sent: float
    acknowledged: float


@dataclass
class Record:
    """What all clients have seen.

    Attributes:
        answers: Requests for slates.
        clicks: Whether a click was acknowledged, by goal, arm, user, answer and item.
        switches: Stops and starts.
        kills: Replica and time.monotonic() of each kill.
        wrong: Answers that no client expects.
    """

    answers: list[Answer] = field(default_factory=list)
    clicks: dict[tuple[str, str, str, str, str], bool] = field(default_factory=dict)
    switches: list[Switch] = field(default_factory=list)
    kills: list[tuple[int, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def count(self) -> int:
        """Number of answers and clicks."""
        return len(self.answers) + len(self.clicks)

    def check_stops(self) -> list[str]:
        """Returns the answers of an arm that began after a stop and ended before a start."""
        found = []
        ends = [one.sent for one in self.switches[1:]] + [np.inf]
        for one, end in zip(self.switches, ends, strict=True):
            begin = one.acknowledged + LEASE_S + LABEL_S
            late = (a for a in self.answers if a.arm and a.arm != "?" and not one.running)
            found += [f"{a} after {one}" for a in late if a.began > begin and a.ended < end]
        return found

    def check_counts(self, one: Experiment, told: int) -> tuple[list[str], list[str], int]:
        """Compares what was acknowledged with the sums.

        Args:
            one: An experiment with the sums of all replicas.
            told: About how many requests the sums lack.

        Returns:
            What is wrong about clicks, and about answers, and how many answers the sums lack.
        """
        clicks, answers = list[str](), list[str]()
        seed, counts = one.split.seed, one.counts
        for place, goal in enumerate(counts.goals):
            low, high = Counter[Group](), Counter[Group]()
            for (kind, arm, user, _, _), acknowledged in self.clicks.items():
                if kind == goal:
                    low[arm, user_group(seed, user)] += acknowledged
                    high[arm, user_group(seed, user)] += 1
            for arm, group, counted in _cells(one, counts.events[:, place]):
                if not low[arm, group] <= counted <= high[arm, group]:
                    clicks.append(
                        f"{goal} of {arm}, group {group}: {counted} counted, {low[arm, group]} "
                        f"acknowledged of {high[arm, group]}"
                    )
        known, unknown = Counter[Group](), Counter[Group]()
        for each in self.answers:
            group = user_group(seed, each.user)
            if each.arm == "?":
                unknown[one.split.assign(each.user).arm or "", group] += 1
            elif each.arm:
                known[each.arm, group] += 1
        lacking = 0
        for arm, group, counted in _cells(one, counts.answers):
            lacking += max(0, known[arm, group] - counted)
            if counted > known[arm, group] + unknown[arm, group]:
                answers.append(
                    f"answers of {arm}, group {group}: {counted} counted, {known[arm, group]} and "
                    f"{unknown[arm, group]} without an answer"
                )
        unsent = sum(
            number == each.replica and time_s - UNSENT_S < each.ended and each.began < time_s + 1.0
            for each in self.answers
            for number, time_s in self.kills
        )
        if lacking > unsent or (lacking and not told):
            answers.append(
                f"{lacking} answers are not counted, {told} are told; killed replicas gave "
                f"{unsent} in their last {UNSENT_S} s"
            )
        return clicks, answers, lacking


def _cells(one: Experiment, sums: np.ndarray) -> Iterator[tuple[str, int, int]]:
    """Yields arm, group and count of [A, groups] sums."""
    for arm in one.arms:
        for group, count in enumerate(sums[arm.number].tolist()):
            yield arm.name, group, count


@dataclass
class Seen:
    """What a run has shown.

    Attributes:
        record: What the clients saw.
        faults: Number of faults by kind.
        clicks, answers: What is wrong about the counts.
        stops: Answers of an arm after a stop.
        verdicts: Replicas whose state is not that of one process with the same sums.
        told: About how many requests the sums lack, as the replicas say.
        lacking: Answers that the sums lack.
        requests: Counted requests.
    """

    record: Record
    faults: Counter[str]
    clicks: list[str]
    answers: list[str]
    stops: list[str]
    verdicts: list[str]
    told: int
    lacking: int
    requests: int

    @property
    def num_operations(self) -> int:
        """Answers and clicks."""
        return self.record.count()


class Clicker(threading.Thread):
    """A client: asks one replica for slates, and sends each click twice, to any replicas."""

    def __init__(self, record: Record, urls: Sequence[str], draw: np.random.Generator) -> None:
        super().__init__(daemon=True, name="clicker")
        self.record, self.draw, self.stopped = record, draw, threading.Event()
        self._clients = [httpx.Client(base_url=url, timeout=TIMEOUT_S) for url in urls]

    def run(self) -> None:
        """Sends until it is stopped."""
        while not self.stopped.is_set():
            self._ask()

    def close(self) -> None:
        """Ends the thread and closes the connections."""
        self.stopped.set()
        self.join()
        for client in self._clients:
            client.close()

    def _ask(self) -> None:
        user = f"user-{self.draw.integers(NUM_USERS)}"
        began, body = time.monotonic(), {"user": {"id": user}, "k": 4}
        replica = int(self.draw.integers(len(self._clients)))
        answer = self._send("/v1/recommend", body, replica)
        said = None if answer is None or answer.status_code != 200 else answer.json()
        arm: str | None = "?"
        if said is not None:
            label = said["experiment"]
            arm = label["arm"] if label["reason"] is None else None
            if label["reason"] not in (None, "unknown", "stopped"):
                self.record.wrong.append(f"label {label}")
        elif answer is not None and answer.status_code < 500:
            self.record.wrong.append(f"recommend {answer.status_code}: {answer.text[:200]}")
        self.record.answers.append(Answer(began, time.monotonic(), replica, user, arm))
        if said is None or arm is None:
            return
        shown = [item["item_id"] for item in said["items"]]
        for item in shown:
            if self.draw.random() < CLICKS[arm or ""]:
                self._click(user, arm or "", said["attribution_token"], item)
        if self.draw.random() < 0.1:
            self._click_unseen(user, said["attribution_token"], shown)

    def _click(self, user: str, arm: str, token: str, item: str) -> None:
        goal = str(self.draw.choice(SETTINGS["goals"]))
        key, event_id = (goal, arm, user, token, item), f"{token[-12:]} {item} {goal}"
        event = {"user_id": user, "item_id": item, "type": goal, "event_id": event_id}
        for _ in range(2):
            self.record.clicks.setdefault(key, False)
            answer = self._send("/v1/events", {"events": [event | {"attribution_token": token}]})
            if answer is not None and answer.status_code == 200:
                said = answer.json()
                if said.get("unattributed") or said.get("rejected"):
                    self.record.wrong.append(f"click: {answer.text[:200]}")
                self.record.clicks[key] = True

    def _click_unseen(self, user: str, token: str, shown: Sequence[str]) -> None:
        """Clicks on an item that the slate has not shown; the counts must not have it."""
        item = next(name for name in (f"item{n:06d}" for n in range(20)) if name not in shown)
        event = {"user_id": user, "item_id": item, "type": "click", "attribution_token": token}
        answer = self._send("/v1/events", {"events": [event]})
        if answer is not None and answer.status_code == 200:
            said = answer.json()
            if not said.get("unattributed") and not said.get("rejected"):
                self.record.wrong.append(f"a click on an item that was not shown: {answer.text}")

    def _send(self, path: str, body: Any, replica: int | None = None) -> httpx.Response | None:
        chosen = int(self.draw.integers(len(self._clients))) if replica is None else replica
        client = self._clients[chosen]
        try:
            answer = client.post(path, json=body)
        except httpx.TransportError:
            self.stopped.wait(PAUSE_S)
            return None
        if answer.status_code >= 500:
            self.stopped.wait(PAUSE_S)
        return answer


def on_one_redis(site: Site, plan: Plan) -> Seen:
    """Runs replicas on one Redis that writes each change to its disk before it answers."""
    folder, random, record = site.scratch(), np.random.default_rng(plan.seed), Record()
    with ExitStack() as stack:
        shared = stack.enter_context(FaultyRedis(folder, NUM_REPLICAS, random))
        settings = {"experiments": [SETTINGS], "admin_keys": [ADMIN]}
        fleet = stack.enter_context(Fleet(site, site.bundle, shared.stores, settings))
        urls = [one.url for one in fleet.replicas]

        def kill() -> None:
            number = shared.replica()
            time.sleep(UNSENT_S)  # after a fault of Redis more is not sent
            record.kills.append((number, time.monotonic()))
            fleet.kill(number)

        def switch() -> None:
            with shared.proxies[shared.replica()].fault(
                "hang"
            ):  # one that is cut off must follow, too
                record.switches.append(_switch(fleet, "stop", random))
                time.sleep(LEASE_S + LABEL_S + 1.0)
            record.switches.append(_switch(fleet, "start", random))

        def stop() -> None:
            fleet.pause(shared.replica(), float(random.uniform(0.5, 4)))

        faults = [
            ("a replica is killed", kill),
            ("the network of Redis fails", lambda: shared.break_network(4.0)),
            ("Redis is killed", lambda: shared.kill(2.5)),
            ("a stop and a start", switch),
            ("a replica is stopped", stop),
            ("Redis is stopped", shared.stop),
        ]
        draws = np.random.default_rng(plan.seed).spawn(NUM_CLIENTS)
        clients = [Clicker(record, urls, draw) for draw in draws]
        made = drive(clients, record.count, plan, faults)
        return _judge(fleet, record, made, f"redis://127.0.0.1:{shared.port}/0")


def _switch(fleet: Fleet, change: str, random: np.random.Generator) -> Switch:
    """Stops or starts the experiment on any replica, until one acknowledges it."""
    sent = time.monotonic()
    while time.monotonic() < sent + SETTLE_S:
        url = fleet.replicas[int(random.integers(NUM_REPLICAS))].url
        try:
            answer = httpx.post(
                f"{url}/admin/experiments/shared:{change}", headers=BEARER, timeout=TIMEOUT_S
            )
            if answer.status_code == 200:
                return Switch(change == "start", sent, time.monotonic())
        except httpx.TransportError:
            pass
        time.sleep(PAUSE_S)
    raise RuntimeError(f"no replica acknowledges a {change}")


def _judge(fleet: Fleet, record: Record, faults: Counter[str], url: str) -> Seen:
    """Compares the sums in Redis, what the clients saw, and what each replica says."""
    fleet.until_ready()
    _wait_for_exchanges(fleet)
    one = Experiment(parse_experiments([SETTINGS])[0])
    board = open_board(url, "items", one, "checker")
    try:
        sums = board.read([])
    finally:
        board.close()
    one.counts.values[:] = sums.now
    one._before.values[:] = sums.before
    told = sums.lost + sums.killed
    expected, verdicts = one.describe(), []
    for number, replica in enumerate(fleet.replicas):
        with replica.client() as client:
            answer = client.get("/v1/experiments")
        (found,) = _read_status(answer.content).experiments
        for mine, theirs in zip(expected.arms, found.arms, strict=True):
            pairs = [
                (each.requests, each.errors, each.empty, each.answers, each.users, each.goals)
                + ((each.verdict.kind, each.verdict.guardrails) if each.verdict else ())
                for each in (mine, theirs)
            ]
            if pairs[0] != pairs[1] or found.sample_ratio_p != expected.sample_ratio_p:
                verdicts.append(f"replica {number}: {pairs[1]}; one process: {pairs[0]}")
    clicks, answers, lacking = record.check_counts(one, told)
    return Seen(
        record=record,
        faults=faults,
        clicks=clicks,
        answers=answers,
        stops=record.check_stops(),
        verdicts=verdicts,
        told=told,
        lacking=lacking,
        requests=int(one.counts.results[:, 0].sum()),
    )


def _read_status(content: bytes) -> ExperimentsResponse:
    return msgspec.json.decode(content, type=ExperimentsResponse)


def _wait_for_exchanges(fleet: Fleet) -> None:
    """Waits until all replicas reach Redis and their counts have stayed the same for a while."""
    same: dict[int, list[Any]] = defaultdict(list)
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        for number, replica in enumerate(fleet.replicas):
            with replica.client() as client:
                (one,) = client.get("/v1/experiments").json()["experiments"]
            same[number].append((one["status"], [arm["requests"] for arm in one["arms"]]))
        last = [each[-4:] for each in same.values()]
        if all(len(each) == 4 for each in last) and all(
            one == last[0][0] and one[0] != "unknown" for each in last for one in each
        ):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the replicas do not agree: {[each[-1] for each in same.values()]}")
