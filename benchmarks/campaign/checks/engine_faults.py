"""R7 and R8: requests that break a forward pass, and engines that die."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np

from benchmarks.campaign.batch_writer import BatchWriter, Event, count_lost, wait_for_batches
from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.faulty_server import LOST, ONCE, POISON, POISONED
from benchmarks.campaign.filter_oracle import count_misfits, draw_wide_filter, read_items
from benchmarks.campaign.site import FAULTY, ServerProcess, Site
from benchmarks.campaign.traffic import Body, history, item, slate_bodies

TOGETHER = 64
HANG_S = 30.0
# Acknowledged before each kill, if the machine is not too busy. With the two kills of the shortest
# run, a store that loses 2 % of them passes with a probability of 1e-7.
BATCHES = 400
LOSS, MISSED = 0.02, 1e-6
Slate = list[tuple[str, float]]


def poisons(random: np.random.Generator) -> list[Body]:
    """Returns requests of many kinds that must not harm others; the first breaks its steps."""
    few = history(random)
    deep: dict[str, object] = {"eq": ["item_id", item(3)]}
    for _ in range(40):
        deep = {"not": deep}
    return [
        {"history": few, "k": POISON},
        {"history": ["gone", "\x00", "item", "\ud800".encode("utf-8", "replace").decode()], "k": 5},
        {"history": few, "k": 1000},
        {"history": few, "k": 0},
        {"history": few, "k": -(2**70)},
        {"history": few, "k": 10, "beam_width": 10**9},
        {"history": few, "k": 5, "strategy": "no-such"},
        {"history": few, "k": 5, "filter": deep},
        {"history": few, "k": 5, "filter": {"in": ["item_id", [item(n) for n in range(400)]]}},
        {"history": few, "k": 5, "filter": {"eq": ["no-such", {"a": 1}]}},
        {"history": few, "k": 5, "exclude": {"item_ids": [item(n) for n in range(499)]}},
        {"history": few, "k": 5, "exclude": {"item_ids": [item(n) for n in range(500)]}},
        {"history": few * 100, "k": 5},
        {"history": [], "k": 5},
        {"user": {"id": "x" * 480}, "k": 5},
        {"user": {"id": "\x00\n\u202e"}, "k": 5},
        {"user": {"id": ""}, "k": 5},
        {"history": few, "k": 5, "timeout_ms": 1},
        {"history": few, "k": 5, "strategy": "nezha"},
        {"history": few, "k": 5, "strategy": "speculative", "beam_width": 500},
        {"history": few, "k": 5, "explain": True},
        {"history": few, "k": 5, "dense_weight": 1e308},
        {"history": [None, 5, {}], "k": 5},
        {"history": few, "k": float(2**60)},
        {"history": few, "k": 500, "beam_width": 500},
    ]


def slate(answer: httpx.Response) -> Slate:
    """Returns items and scores of an answer; an error is an empty slate."""
    if answer.status_code != 200:
        return []
    return [(one["item_id"], one["score"]) for one in answer.json()["items"]]


@check("R7", "poison", "25 kinds of harmful requests among 63 others", cases=10_000, minimum_s=15)
def poison(site: Site, budget: Budget) -> Finding:
    """Compares the slates of neighbours with those of a run without harmful requests.

    Every second neighbour has a filter.
    """
    random, items = np.random.default_rng(site.seed), read_items(site.bundle)
    neighbours = slate_bodies(random, TOGETHER - 1)
    for body in neighbours[::2]:
        body["filter"] = draw_wide_filter(items, random, 50)
    sent, different, broken, misfits = 0, 0, 0, 0
    with (
        site.server(FAULTY, invariant=True) as server,
        server.client() as client,
        ThreadPoolExecutor(TOGETHER) as pool,
    ):

        def ask(body: Body) -> httpx.Response:
            return client.post("/v1/recommend", json=body)

        (server.folder / POISONED).touch()
        expected = [slate(one) for one in pool.map(ask, neighbours)]
        if not all(expected):
            raise RuntimeError(f"a neighbour has no slate: {server.tail()}")
        kinds = len(poisons(random))
        for number in budget.cases(10_000, 0.9, kinds):
            bad = poisons(random)[number % kinds]
            place = int(random.integers(TOGETHER))
            answers = list(pool.map(ask, [*neighbours[:place], bad, *neighbours[place:]]))
            own = answers.pop(place)
            sent += 1
            different += sum(
                slate(one) != right for one, right in zip(answers, expected, strict=True)
            )
            misfits += sum(
                count_misfits(items, [name for name, _ in slate(one)], body["filter"])
                for body, one in zip(neighbours[::2], answers[::2], strict=True)
            )
            # The broken forward pass is an internal error of that request; nothing else is.
            broken += own.status_code >= 500 and own.status_code != 504 and number % kinds != 0
        ended = server.process.poll() is not None
    return Finding(
        sent,
        (
            Figure("neighbours with another slate", different, 0),
            Figure("neighbours' items that their filter does not allow", misfits, 0),
            Figure("5xx of a harmful request", broken, 0),
            Figure("server ended", ended, 0),
        ),
        f"{sent * (TOGETHER - 1)} neighbours, with `invariant`: items and scores equal to the bit",
    )


class OutageClient(threading.Thread):
    """A client that goes on while servers end and start.

    Attributes:
        answers: Answers with status 200.
        hung: Requests without an answer or a closed connection within HANG_S.
    """

    def __init__(self, url: str, bodies: list[Body]) -> None:
        super().__init__(daemon=True)
        self.url, self.bodies = url, bodies
        self.answers = self.hung = 0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Lets the client end after its request."""
        self._stopped.set()

    def run(self) -> None:
        """Sends until it is stopped."""
        number = 0
        while not self._stopped.is_set():
            number += 1
            body = self.bodies[number % len(self.bodies)]
            try:
                # Without `verify` no certificates are read, which would take longer than an answer.
                answer = httpx.post(
                    f"{self.url}/v1/recommend", json=body, timeout=HANG_S, verify=False
                )
                self.answers += answer.status_code == 200
            except httpx.TimeoutException:
                self.hung += 1
            except httpx.TransportError:
                time.sleep(0.05)


def unseen(number: int) -> Body:
    """Returns a body whose history no other request has, so that it needs a forward pass."""
    return {"history": [item(n) for n in range(number, number + 20)], "k": 10, "strategy": "beam"}


def goes_on(server: ServerProcess, body: Body) -> bool:
    """Makes one forward pass fail with a CUDA error. Returns whether the request is answered."""
    failing = server.folder / ONCE
    failing.touch()
    answer = server.post("/v1/recommend", body)
    return bool(slate(answer)) and not failing.exists() and server.process.poll() is None


def end(server: ServerProcess, number: int) -> int:
    """Kills a server, or makes every CUDA call fail. Returns its exit status."""
    if number % 2:
        (server.folder / LOST).touch()
        status = server.process.wait(60)
        (server.folder / LOST).unlink()
        return status
    os.kill(server.process.pid, signal.SIGKILL)
    return server.process.wait(60)


@check(
    "R8",
    "engine death",
    "kill -9, and a CUDA error that stays, in turn, while clients ask for slates and write batches "
    "of events; before each, one that passes",
    cases=100,
    minimum_s=25,
)
def engine_death(site: Site, budget: Budget) -> Finding:
    """Starts the server again each time, as a supervisor does, and looks up all events."""
    bodies = slate_bodies(np.random.default_rng(site.seed), 100)
    server = site.start(FAULTY)
    kills, recovered, lost, wrong_status, failed = 0, [], 0, 0, 0
    batches: list[list[Event]] = []
    try:
        load_s = server.until_ready()
        clients = [OutageClient(server.url, bodies) for _ in range(4)]
        writers = [BatchWriter(f"writer{n}", server.url) for n in range(4)]
        for client in (*clients, *writers):
            client.start()
        for number in budget.cases(100, 0.9, 2):
            failed += not goes_on(server, unseen(number))
            wait_for_batches(writers, BATCHES)
            status = end(server, number)
            wrong_status += number % 2 and status != 1
            # No server runs now, so all of these were acknowledged before the kill.
            written = [batch for writer in writers for batch in writer.take()]
            began = time.monotonic()
            server = server.again()
            server.until_ready()
            recovered.append(time.monotonic() - began)
            with server.client() as reader:
                lost += count_lost(reader, itertools.chain.from_iterable(written))
            batches += written
            kills += 1
        for client in (*clients, *writers):
            client.stop()
        for client in (*clients, *writers):
            client.join(2 * HANG_S)
        hung = sum(client.hung + client.is_alive() for client in (*clients, *writers))
        refused = sum((writer.refused for writer in writers), Counter[str]())
        answered = sum(client.answers for client in clients)
    finally:
        server.stop()
    events = sum(map(len, batches))
    missed = (1 - LOSS) ** len(batches)
    return Finding(
        kills,
        (
            Figure("clients that hang", hung, 0),
            Figure("slowest restart beyond the first start, in s", max(recovered) - load_s, 10),
            Figure(
                "acknowledged events that are not stored once",
                lost,
                0,
                judged=lost > 0 or missed <= MISSED,
            ),
            Figure("batches of events that a ready server refuses", refused.total(), 0),
            Figure("lost devices without exit status 1", wrong_status, 0),
            Figure("passing CUDA errors that fail a request", failed, 0),
        ),
        "the engine is a thread of the server: a dead engine ends the process, and a supervisor "
        f"starts it again; first start {load_s:.1f} s, {answered} answers; {events:,} events "
        f"acknowledged in {len(batches):,} batches, so a loss of {LOSS:.0%} of them is missed with "
        f"a probability of {missed:.0e}; refused batches: {dict(refused) or 'none'}",
    )
