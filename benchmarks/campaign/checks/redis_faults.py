"""R9: a history store in Redis that fails in twelve ways."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx
import numpy as np
import redis

from benchmarks.campaign.check import Budget, Figure, Finding, NotRun, check
from benchmarks.campaign.fault_proxy import FaultProxy
from benchmarks.campaign.site import ServerProcess, Site
from benchmarks.campaign.traffic import Body, history, item, percentile
from tests.support.redis_server import start_redis

USERS = 40
NETWORK = ("down", "refuse", "hang", "latency", "loss", "reset", "half", "garbage")
STORE = ("wrong type", "out of memory", "read-only", "no password")
RECOVERY_S = 20.0


@dataclass(frozen=True)
class Loop:
    """What became of requests during a fault.

    Attributes:
        valid: Answers with status 200 and ten items.
        sent: Requests.
        stored_ms: Latencies of requests that read a stored history.
        inline_ms: Latencies of requests with a history of their own.
        wrong: The first answer that was not valid.
    """

    valid: int
    sent: int
    stored_ms: list[float]
    inline_ms: list[float]
    wrong: str


def key_of(user: int) -> Body:
    """Returns a user of the campaign."""
    return {"id": f"stored{user}"}


def loop(server: ServerProcess, random: np.random.Generator, seconds: float) -> Loop:
    """Sends requests of both kinds from four clients."""
    valid, sent, stored, inline, wrong = [0], [0], [], [], [""]

    def run(draw: np.random.Generator) -> None:
        end = time.monotonic() + seconds
        with server.client() as client:
            while time.monotonic() < end:
                body: Body = {"user": key_of(int(draw.integers(USERS))), "k": 10}
                own = draw.random() < 0.5
                if own:
                    body["history"] = history(draw)
                began = time.perf_counter()
                try:
                    answer = client.post("/v1/recommend", json=body)
                    good = answer.status_code == 200 and len(answer.json()["items"]) == 10
                    said = "" if good else answer.text[:200]
                except httpx.TransportError as error:
                    good, said = False, repr(error)
                (inline if own else stored).append((time.perf_counter() - began) * 1e3)
                sent[0] += 1
                valid[0] += good
                wrong[0] = wrong[0] or said

    threads = [threading.Thread(target=run, args=(one,)) for one in random.spawn(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Loop(valid=valid[0], sent=sent[0], stored_ms=stored, inline_ms=inline, wrong=wrong[0])


@contextmanager
def store_fault(name: str, direct: redis.Redis, keys: list[bytes]) -> Iterator[None]:
    """Makes the Redis server itself fail."""
    kept = {key: direct.get(key) for key in keys} if name == "wrong type" else {}
    undo: Callable[[], object]
    match name:
        case "wrong type":
            for key in keys:
                direct.delete(key)
                direct.lpush(key, "not a history")
            undo = lambda: [direct.delete(k) and direct.set(k, v) for k, v in kept.items()]  # noqa: E731
        case "out of memory":
            direct.config_set("maxmemory", 1)
            undo = lambda: direct.config_set("maxmemory", 0)  # noqa: E731
        case "read-only":
            direct.config_set("min-replicas-to-write", 3)
            undo = lambda: direct.config_set("min-replicas-to-write", 0)  # noqa: E731
        case _:
            direct.config_set("requirepass", "another-password")
            direct.client_kill_filter(_type="normal", skipme=True)
            undo = lambda: direct.config_set("requirepass", "")  # noqa: E731
    try:
        yield
    finally:
        undo()


def recovered(server: ServerProcess) -> float:
    """Returns the seconds until a stored history is used and an event is accepted again."""
    began = time.monotonic()
    event = {"user_id": "stored0", "item_id": item(1), "event_id": f"{began}"}
    while time.monotonic() < began + RECOVERY_S:
        answer = server.post("/v1/recommend", {"user": key_of(1), "k": 10})
        posted = server.post("/v1/events", {"events": [event]})
        if answer.status_code == posted.status_code == 200 and not answer.json()["degraded"]:
            return time.monotonic() - began
        time.sleep(0.02)
    return RECOVERY_S


@check(
    "R9",
    "Redis faults",
    "12 faults of Redis and its network, under load and from idle",
    cases=36,
    minimum_s=60,
    weight=2,
)
def redis_faults(site: Site, budget: Budget) -> Finding:
    """Makes Redis fail and recover, while clients ask for slates."""
    folder, random = site.scratch(), np.random.default_rng(site.seed)
    try:
        process, port = start_redis(folder)
    except BaseException as why:  # pytest's skip and fail are no Exceptions
        if isinstance(why, KeyboardInterrupt):
            raise
        raise NotRun("no redis-server on this machine") from None
    faults = [*NETWORK, *STORE]
    loops: list[Loop] = []
    back_s: dict[str, float] = {}
    added: dict[str, float] = {}
    try:
        with (
            redis.Redis(port=port) as direct,
            FaultProxy(port, site.seed) as proxy,
            site.server(store=f"redis://127.0.0.1:{proxy.port}/0") as server,
        ):
            events = [
                {"user_id": f"stored{n % USERS}", "item_id": item(n), "event_id": str(n)}
                for n in range(3 * USERS)
            ]
            server.post("/v1/events", {"events": events}).raise_for_status()
            keys = list(direct.scan_iter(b"recserve:history:*"))
            loop(server, random, 1.0)
            usual = loop(server, random, budget.share(0.06, 1.0))
            # A store that hangs is left alone after five slow calls: the first part shows them.
            part_s = max(2.0, (budget.left_s / len(faults) - 0.7) / 2)
            for number in budget.cases(36, least=len(faults)):
                name = faults[number % len(faults)]
                with proxy.fault(name) if name in NETWORK else store_fault(name, direct, keys):
                    loops.append(loop(server, random, part_s))
                    late = loop(server, random, part_s)
                    loops.append(late)
                added[name] = percentile(late.stored_ms, 50) - percentile(usual.stored_ms, 50)
                back_s[name] = max(back_s.get(name, 0.0), recovered(server))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
    sent, valid = sum(one.sent for one in loops), sum(one.valid for one in loops)
    inline = [ms for one in loops for ms in one.inline_ms]
    slow = max(added, key=lambda name: added[name])
    return Finding(
        len(loops) // 2,
        (
            Figure("valid answers", valid / sent, 0.9995, at_least=True),
            Figure(
                "added p99 in ms, history in the request",
                percentile(inline, 99) - percentile(usual.inline_ms, 99),
                5,
            ),
            Figure("added median in ms, stored history, late in a fault", added[slow], 5),
            Figure("slowest recovery in s", max(back_s.values()), 5),
        ),
        f"{sent} answers; slowest fault {slow}, slowest recovery "
        f"{max(back_s, key=lambda name: back_s[name])}; "
        + next((one.wrong for one in loops if one.wrong), ""),
    )
