"""Replicas with one catalogue log in Redis, faults of both, and clients that record histories."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import redis

from benchmarks.campaign.batch_writer import count_lost
from benchmarks.campaign.catalog_bundles import LogWatch, judged_by_items
from benchmarks.campaign.catalog_clients import LIVE, MIN_VERSION, CatalogClient, Record
from benchmarks.campaign.catalog_histories import (
    HIDDEN,
    End,
    Report,
    Result,
    SharedLog,
    Version,
    check_history,
)
from benchmarks.campaign.fleet_faults import FaultyRedis, Plan, drive, pause, redis_or_not_run
from benchmarks.campaign.site import ADMIN, ADMIN_KEY, SERVE, ServerProcess, Site
from benchmarks.campaign.traffic import slate_bodies
from tests.support.redis_server import servers, start_sentinel, wait_for

NUM_REPLICAS, NUM_CLIENTS = 3, 8
STALE_MS = 1500
HEARTBEAT_S = 4.0  # all replicas know of a load then
KV_BYTES = 2**23
# Same catalogue, same items with other semantic ids, other items.
ROLLED_OUT = ("two", "anew", "other", "one")
SETTLE_S = 60.0
STARTS = 5  # of a replica that ends because Redis does not answer it
SIGNING_KEY = "a-signing-key-of-the-campaign"


@dataclass
class Seen:
    """What a run has shown.

    Attributes:
        report: The verdicts about the history.
        record: What the clients saw.
        num_operations: Number of recorded operations and acknowledged events.
        faults: Number of faults by kind.
        lost_events: Acknowledged events that are not stored once.
        losses: How often replicas counted a loss of the log.
        conflicts: How often a replica found its position taken.
        assigned: Entries of the log with which a bundle has taken over changes of another one.
    """

    report: Report
    record: Record
    num_operations: int
    faults: Counter[str]
    lost_events: int
    losses: float
    conflicts: float
    assigned: int


@dataclass
class Fleet:
    """Replicas of one catalogue.

    Attributes:
        site: Where they work.
        bundle: Bundle of replicas that start.
        stores: Store of each replica.
        replicas: The replicas.
        losses: Losses of the log that replicas which have ended had counted.
        conflicts: Likewise, positions that were taken.
    """

    site: Site
    bundle: Path
    stores: Sequence[str]
    settings: dict[str, Any] = field(default_factory=dict)
    replicas: list[ServerProcess] = field(default_factory=list)
    losses: float = 0.0
    conflicts: float = 0.0

    def __enter__(self) -> Fleet:
        for store in self.stores:
            settings = {"bundle": self.bundle, "store": store, "catalog_log": "redis"}
            settings |= {"catalog_stale_ms": STALE_MS, "signing_key": SIGNING_KEY, **self.settings}
            self.replicas.append(ServerProcess(self.site.scratch(), settings, SERVE))
        try:
            for one in self.replicas:
                one.until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.replicas:
            with suppress(ProcessLookupError):
                os.kill(one.process.pid, signal.SIGCONT)
            one.stop()

    def kill(self, number: int) -> None:
        """Ends a replica by force and starts it again."""
        one = self.replicas[number]
        self._count(one)
        os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
        self.start(number)

    def restart(self, number: int, bundle: Path) -> None:
        """Ends a replica as an operator does, and starts it with a bundle."""
        one = self.replicas[number]
        self._count(one)
        one.stop()
        one.settings["bundle"] = bundle
        self.start(number)

    def load_all(self, bundle: Path, asked: int, meanwhile: Callable[[], object]) -> None:
        """Lets the running replicas load a bundle one after another.

        Args:
            bundle: The bundle, which a replica that starts has from now on too.
            asked: The replica that gets the request.
            meanwhile: Called while they load.
        """
        for one in self.replicas:
            one.settings["bundle"] = bundle
        body = {"path": bundle.name, "fleet": True}
        self.replicas[asked].post("/admin/bundle:load", body, headers=ADMIN).raise_for_status()
        time.sleep(HEARTBEAT_S)
        meanwhile()
        _wait(lambda: self._has_ended(bundle), 3 * SETTLE_S)
        for one in self.replicas:
            with one.client(headers=ADMIN) as client:
                found = client.get("/admin/bundle").json()
                if found["current"]["path"] != bundle.name:
                    raise RuntimeError(f"the fleet has not loaded {bundle.name}: {found}")

    def _has_ended(self, bundle: Path) -> bool:
        """Whether every replica says that all have a bundle."""
        for one in self.replicas:
            with one.client(headers=ADMIN) as client:
                found = client.get("/admin/bundle").json().get("fleet")
                if found is None or (found["path"], found["state"]) != (bundle.name, "ready"):
                    return False
        return True

    def start(self, number: int) -> None:
        """Starts a replica that has ended, again where it ends, and waits until it is ready."""
        for _ in range(STARTS):
            self.replicas[number] = self.replicas[number].again()
            status = self.replicas[number].until_settled(SETTLE_S)
            if status is None:
                return
            if status == -1:
                break
        raise RuntimeError(f"a replica does not start: {self.replicas[number].tail()}")

    def pause(self, number: int, seconds: float) -> None:
        """Stops a replica for some time."""
        pause(self.replicas[number].process.pid, seconds)

    def until_ready(self) -> None:
        """Waits until all replicas are ready."""
        for one in self.replicas:
            one.until_ready()

    def count(self) -> None:
        """Adds the figures of the running replicas."""
        for one in self.replicas:
            self._count(one)

    def _count(self, one: ServerProcess) -> None:
        with suppress(httpx.HTTPError):
            found = one.metrics()
            self.losses += found.get("recserve_catalog_losses_total", 0.0)
            self.conflicts += found.get("recserve_catalog_conflicts_total", 0.0)


def on_one_redis(site: Site, plan: Plan, settings: dict[str, Any] | None = None) -> Seen:
    """Runs replicas on one Redis that writes each change to its disk before it answers.

    Faults: a killed and a stopped replica, a killed and a stopped Redis, a faulty network between a
    replica and Redis, and a rollout of the next bundle.
    """
    bundles, folder = site.shelf(), site.scratch()
    random = np.random.default_rng(plan.seed)
    with ExitStack() as stack:
        shared = stack.enter_context(FaultyRedis(folder, NUM_REPLICAS, random))
        swaps = {"bundles_dir": bundles, "admin_keys": [ADMIN_KEY], "kv_bytes": KV_BYTES}
        settings = {**swaps, **(settings or {})}
        fleet = stack.enter_context(Fleet(site, bundles / "one", shared.stores, settings))
        record = Record([one.url for one in fleet.replicas])

        following = cycle(ROLLED_OUT[plan.seed % 3 :] + ROLLED_OUT[: plan.seed % 3])

        def roll_out() -> None:
            fleet.bundle = bundles / next(following)
            for number in range(NUM_REPLICAS):
                fleet.restart(number, fleet.bundle)

        def load_all() -> None:
            fleet.bundle = bundles / next(following)
            fleet.load_all(fleet.bundle, shared.replica(), lambda: fleet.kill(shared.replica()))

        def stop() -> None:
            fleet.pause(shared.replica(), float(random.uniform(0.5, 3)))

        faults = [
            ("a replica is killed", lambda: fleet.kill(shared.replica())),
            ("the network of Redis fails", lambda: shared.break_network(3.0)),
            ("Redis is killed", lambda: shared.kill(1.5)),
            ("a replica is stopped", stop),
            ("Redis is stopped", shared.stop),
            ("the network of Redis fails", lambda: shared.break_network(3.0)),
        ]
        rollouts = [
            ("a rollout", roll_out),
            ("a load of the fleet with a killed replica", load_all),
        ]
        # Two rollouts for each ten other faults.
        faults = [*faults[:2], rollouts[0], *faults[2:4], rollouts[1], *faults[4:], *faults[:4]]
        watch = stack.enter_context(closing(LogWatch(shared.port)))
        watch.start()
        made = drive(_clients(record, plan.seed), record.count, plan, faults)
        return _judge(fleet, record, made, watch=watch)


def with_failovers(site: Site, plan: Plan, settings: dict[str, Any] | None = None) -> Seen:
    """Runs replicas on Redis with a Sentinel, which fails over from a primary that is stopped.

    Before every second failover the primary has lost its replica, so that it acknowledges what the
    replica does not have. A stopped primary goes on afterwards and finds that it is none any more.
    """
    folder = site.scratch()
    random = np.random.default_rng(plan.seed)
    with ExitStack() as stack:
        started = stack.enter_context(servers())
        with redis_or_not_run():
            address, _ = start_sentinel(folder, started)
        sentinel = stack.enter_context(redis.Redis(port=int(address.rpartition(":")[2])))
        store = f"redis+sentinel://{address}/shop"
        fleet = stack.enter_context(
            Fleet(site, site.bundle, [store] * NUM_REPLICAS, settings or {})
        )
        record = Record([one.url for one in fleet.replicas])
        pids = {_port(one): one.pid for one in started[:2]}

        def primary() -> int:
            return int(sentinel.sentinel_get_master_addr_by_name("shop")[1])

        def fail_over(cut: bool) -> None:
            old = primary()
            (new,) = set(pids) - {old}
            if cut:
                os.kill(pids[new], signal.SIGSTOP)
                with redis.Redis(port=old) as direct:
                    direct.execute_command("CLIENT", "KILL", "TYPE", "replica")
                before = len(record.operations)
                _wait(lambda: _num_changes(record, before) >= 5, 10.0)
            os.kill(pids[old], signal.SIGSTOP)
            try:
                if cut:
                    os.kill(pids[new], signal.SIGCONT)
                wait_for(lambda: primary() == new, "the Sentinel did not fail over")
                time.sleep(float(random.uniform(0.5, 2)))
            finally:
                os.kill(pids[old], signal.SIGCONT)
            with redis.Redis(port=new) as direct:
                wait_for(
                    lambda: direct.info("replication").get("slave0", {}).get("state") == "online",
                    "the old primary did not become a replica",
                )

        made = drive(
            _clients(record, plan.seed),
            record.count,
            plan,
            [
                ("a failover from a primary without a replica", lambda: fail_over(cut=True)),
                ("a failover", lambda: fail_over(cut=False)),
            ],
        )
        return _judge(fleet, record, made, events=False)


def _judge(
    fleet: Fleet,
    record: Record,
    faults: Counter[str],
    events: bool = True,
    watch: LogWatch | None = None,
) -> Seen:
    """Compares the replicas at the end and checks the history."""
    ends = _ends(fleet, record)
    operations, log = record.operations, SharedLog()
    if watch is not None:
        watch.close()
        operations, log = judged_by_items(operations, watch.entries)
    fleet.count()
    lost = 0
    if events:
        with fleet.replicas[0].client() as client:
            lost = count_lost(client, record.events)
    return Seen(
        report=check_history(operations, dict.fromkeys(LIVE, HIDDEN), ends, log),
        record=record,
        num_operations=record.count(),
        faults=faults,
        lost_events=lost,
        losses=fleet.losses,
        conflicts=fleet.conflicts,
        assigned=len(log.assigned),
    )


def _ends(fleet: Fleet, record: Record) -> list[End]:
    """Makes one more change; returns what each replica answers once it has it.

    If none is accepted, or a replica does not answer, that is noted, and there is no result.
    """
    fleet.until_ready()
    client = CatalogClient(record, NUM_CLIENTS, np.random.default_rng(1))
    try:
        _wait(lambda: _is_ok(client.send("put", 0)), SETTLE_S)
    finally:
        client.close()
    last = record.operations[-1]
    _wait(lambda: _agree(fleet), SETTLE_S)
    if last.result is not Result.OK:
        record.wrong.append(f"no change is accepted at the end: {last}")
        return []
    headers = {MIN_VERSION: str(last.version)}
    bodies = slate_bodies(np.random.default_rng(0), 5, beam_width=50)
    found = []
    for number, one in enumerate(fleet.replicas):
        with one.client(headers=headers) as http:
            answer = http.get("/v1/items", params={"ids": ",".join(LIVE)})
            if answer.status_code != 200:
                record.wrong.append(f"replica {number} at the end: {answer.text[:200]}")
                return []
            said = answer.json()
            items: dict[str, tuple[str, tuple[int, ...]]] = {
                item["item_id"]: (item["title"], tuple(item["semantic_id"]))
                for item in said["items"]
            }
            items |= dict.fromkeys(said["missing_item_ids"], (HIDDEN, ()))
            slates = [
                [(item["item_id"], item["score"]) for item in reply.json()["items"]]
                for reply in (http.post("/v1/recommend", json=body) for body in bodies)
            ]
        found.append(End(number, Version.parse(said["catalog_version"]), items, slates))
    return found


def _agree(fleet: Fleet) -> bool:
    """Whether all replicas name one version, and still do after a while.

    A replica that has loaded another bundle keeps the one before for some minutes. That one takes
    over changes too.
    """
    found = set()
    for pause_s in (0.5, 0.0):
        for one in fleet.replicas:
            with one.client() as client:
                said = client.get("/v1/items", params={"ids": LIVE[0]}).json()
                found.add(said["catalog_version"])
        time.sleep(pause_s)
    return len(found) == 1


def _clients(record: Record, seed: int) -> list[CatalogClient]:
    draws = np.random.default_rng(seed).spawn(NUM_CLIENTS)
    return [CatalogClient(record, number, draw) for number, draw in enumerate(draws)]


def _num_changes(record: Record, first: int) -> int:
    """Returns the number of acknowledged changes from an operation on."""
    return sum(one.changes and one.result is Result.OK for one in record.operations[first:])


def _is_ok(operation: Any) -> bool:
    return operation is not None and operation.result is Result.OK


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    """Waits until a condition holds, or for some seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def _port(server: Any) -> int:
    arguments = server.args
    return int(arguments[arguments.index("--port") + 1])
