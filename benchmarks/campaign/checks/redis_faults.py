"""R9: a history store in Redis that fails in twelve ways."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.failing_redis import NETWORK, STORE, Faults, failing_redis
from benchmarks.campaign.site import ServerProcess, Site
from benchmarks.campaign.traffic import Body, history, item, percentile

USERS = 40
RECOVERY_S, START_S = 20.0, 30.0
PACE_S = 0.04
USER = "user000001"  # has events in the bundle
LOST_HISTORY = {"history_unavailable", "history_damaged"}


@dataclass
class Loop:
    """What became of requests during a fault.

    Attributes:
        valid: Answers with status 200 and ten items.
        sent: Requests.
        silent: Answers without the stored history that do not say so.
        stored_ms: Latencies of requests that read a stored history.
        inline_ms: Latencies of requests with a history of their own.
        acknowledged: Numbers of the events that were answered with 200.
        wrong: The first answer that was not valid.
    """

    valid: int = 0
    sent: int = 0
    silent: int = 0
    stored_ms: list[float] = field(default_factory=list)
    inline_ms: list[float] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    wrong: str = ""

    def ask(self, client: httpx.Client, draw: np.random.Generator) -> None:
        """Sends one request for a slate, from a stored history or with one."""
        body: Body = {"user": key_of(int(draw.integers(USERS))), "k": 10}
        own = draw.random() < 0.5
        if own:
            body["history"] = history(draw)
        began = time.perf_counter()
        try:
            answer = client.post("/v1/recommend", json=body)
            good = answer.status_code == 200 and len(answer.json()["items"]) == 10
            said = "" if good else answer.text[:200]
            missing = good and "cold_start" in answer.json()["degraded"]
            self.silent += missing and not set(answer.json()["degraded"]) & LOST_HISTORY
        except httpx.TransportError as error:
            good, said = False, repr(error)
        (self.inline_ms if own else self.stored_ms).append((time.perf_counter() - began) * 1e3)
        self.sent += 1
        self.valid += good
        self.wrong = self.wrong or said

    def write(self, client: httpx.Client, number: int) -> None:
        """Sends one event of a user of its own."""
        event = {"user_id": f"written{number}", "item_id": item(number), "event_id": f"{number}"}
        with suppress(httpx.TransportError):
            answer = client.post("/v1/events", json={"events": [event]})
            if answer.status_code == 200:
                self.acknowledged.append(number)


def key_of(user: int) -> Body:
    """Returns a user of the campaign."""
    return {"id": f"stored{user}"}


def loop(server: ServerProcess, random: np.random.Generator, seconds: float) -> Loop:
    """Sends requests of both kinds, and some events, from five clients.

    Each client has a rate, so that a fault that makes answers quicker does not raise the load.
    """
    found = Loop()

    def run(draw: np.random.Generator) -> None:
        end = time.monotonic() + seconds
        with server.client() as client:
            while (began := time.monotonic()) < end:
                found.ask(client, draw)
                time.sleep(max(0.0, began + PACE_S - time.monotonic()))

    def write(draw: np.random.Generator) -> None:
        end = time.monotonic() + seconds
        with server.client() as client:
            while time.monotonic() < end:
                found.write(client, int(draw.integers(2**40)))
                time.sleep(PACE_S)

    threads = [threading.Thread(target=run, args=(one,)) for one in random.spawn(4)]
    threads += [threading.Thread(target=write, args=(one,)) for one in random.spawn(1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def lost_events(server: ServerProcess, loops: Sequence[Loop]) -> int:
    """Counts the acknowledged events that are not stored exactly once."""
    lost = 0
    with server.client() as client:
        for number in [number for one in loops for number in one.acknowledged]:
            stored = client.get(f"/v1/users/written{number}/history").raise_for_status().json()
            lost += [one["item_id"] for one in stored["events"]] != [item(number)]
    return lost


def recovered(server: ServerProcess, user: str) -> float:
    """Returns the seconds until a stored history is used and an event is accepted again."""
    began = time.monotonic()
    event = {"user_id": user, "item_id": item(1), "event_id": f"{began}"}
    while time.monotonic() < began + RECOVERY_S:
        answer = server.post("/v1/recommend", {"user": {"id": user}, "k": 10})
        posted = server.post("/v1/events", {"events": [event]})
        if answer.status_code == posted.status_code == 200 and not answer.json()["degraded"]:
            return time.monotonic() - began
        time.sleep(0.02)
    return RECOVERY_S


@dataclass
class Served:
    """What became of requests while the store failed under a running server.

    Attributes:
        start_s: Time that the server took to start.
        usual: Requests without a fault.
        loops: Requests during each fault, in two parts.
        added_ms: By fault, what it added to the median of stored histories in the second part.
        back_s: By fault, the slowest recovery.
        lost: Acknowledged events that are not stored.
    """

    start_s: float
    usual: Loop = field(default_factory=Loop)
    loops: list[Loop] = field(default_factory=list)
    added_ms: dict[str, float] = field(default_factory=dict)
    back_s: dict[str, float] = field(default_factory=dict)
    lost: int = 0


def under_load(site: Site, faults: Faults, budget: Budget) -> Served:
    """Makes Redis fail and recover, while clients ask for slates and write events."""
    random, names = np.random.default_rng(site.seed), (*NETWORK, *STORE)
    server = site.start(store=faults.url)
    try:
        found = Served(server.until_ready())
        events = [
            {"user_id": f"stored{n % USERS}", "item_id": item(n), "event_id": str(n)}
            for n in range(3 * USERS)
        ]
        server.post("/v1/events", {"events": events}).raise_for_status()
        loop(server, random, 1.0)
        found.usual = loop(server, random, budget.share(0.06, 1.0))
        # A store that is slow is left alone after five slow reads: the first part shows them.
        part_s = max(2.0, (0.7 * budget.left_s / len(names) - 0.7) / 2)
        usual_ms = percentile(found.usual.stored_ms, 50)
        for number in budget.cases(24, 0.7, least=len(names)):
            name = names[number % len(names)]
            with faults.of(name):
                parts = [loop(server, random, part_s) for _ in range(2)]
            found.added_ms[name] = percentile(parts[1].stored_ms, 50) - usual_ms
            back_s = recovered(server, "stored0")
            found.back_s[name] = max(found.back_s.get(name, 0.0), back_s)
            found.lost += lost_events(server, parts)
            found.loops += parts
        return found
    finally:
        server.stop()


@dataclass
class Started:
    """What became of servers that started during a fault.

    Attributes:
        count: Number of starts.
        stuck: Faults under which a server neither served nor ended with status 1.
        ended: Number of servers that ended with status 1.
        back_s: By fault, the seconds from its end until slates come from stored histories.
    """

    count: int = 0
    stuck: list[str] = field(default_factory=list)
    ended: int = 0
    back_s: dict[str, float] = field(default_factory=dict)


def at_start(site: Site, faults: Faults, budget: Budget) -> Started:
    """Makes Redis fail while a server opens it and copies the bundle's events to it."""
    names, found = [*NETWORK, *STORE], Started()
    for number in budget.cases(len(names), least=4):
        name = names[(3 * number + number // 4) % len(names)]  # of both kinds from the start
        if name != "wrong type":
            faults.direct.flushdb()
        with faults.of(name):
            server = site.start(store=faults.url)
            said = server.until_settled(START_S)
            if said is None:
                good = server.post("/v1/recommend", {"user": {"id": USER}, "k": 10})
                stuck = good.status_code != 200 or len(good.json()["items"]) != 10
            else:
                stuck = said != 1
        found.count += 1
        found.ended += said == 1
        found.stuck += [name] if stuck else []
        began = time.monotonic()
        try:
            if said is not None:
                server = server.again()
                server.until_ready()
            recovered(server, USER)
            found.back_s[name] = time.monotonic() - began
        finally:
            server.stop()
    return found


@check(
    "R9",
    "Redis faults",
    "12 faults of Redis and its network, under load and while a server starts",
    cases=36,
    minimum_s=90,
    weight=2,
)
def redis_faults(site: Site, budget: Budget) -> Finding:
    """Makes Redis fail and recover, under a running server and under one that starts."""
    with failing_redis(site) as faults:
        served = under_load(site, faults, budget)
        started = at_start(site, faults, budget)
    loops, usual = served.loops, served.usual
    sent, valid = sum(one.sent for one in loops), sum(one.valid for one in loops)
    inline = [ms for one in loops for ms in one.inline_ms]
    slow = max(served.added_ms, key=lambda name: served.added_ms[name])
    slow_start = max(started.back_s, key=lambda name: started.back_s[name])
    return Finding(
        len(loops) // 2 + started.count,
        (
            Figure("valid answers", valid / sent, 0.9995, at_least=True),
            Figure("missing histories that are not told", sum(one.silent for one in loops), 0),
            Figure("acknowledged events that are not stored once", served.lost, 0),
            Figure(
                "added p99 in ms, history in the request",
                percentile(inline, 99) - percentile(usual.inline_ms, 99),
                5,
            ),
            Figure("added median in ms, stored history, late in a fault", served.added_ms[slow], 5),
            Figure("slowest recovery in s", max(served.back_s.values()), 5),
            Figure("starts that neither serve nor end", len(started.stuck), 0),
            Figure(
                "slowest start after a fault beyond a usual one, in s",
                started.back_s[slow_start] - served.start_s,
                5,
            ),
        ),
        f"{sent} answers; slowest fault {slow}, slowest recovery "
        f"{max(served.back_s, key=lambda name: served.back_s[name])}; "
        f"{started.ended} of {started.count} starts ended with status 1, slowest after "
        f"{slow_start}; "
        + next((one.wrong for one in loops if one.wrong), "")
        + ", ".join(started.stuck),
    )
