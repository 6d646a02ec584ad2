"""A day in minutes: a feed whose taste moves, retrained every three hours, with what may go wrong.

A real server answers simulated users over HTTP. Each hour some of them ask for a slate, click what
they want, and some come by themselves. Their topics move. Every hour some items come into fashion
and others go. Every three hours `recserve retrain` runs beside the traffic: one run gets shuffled
labels and shall stop at its gate; one passes its gate, its slates get few clicks, and it shall be
rolled back. The server is killed twice. A second service never retrains; the share of wanted items
in both services' slates is the quality over time.

    python -m benchmarks.server.day --out day.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.bundle.kept_ids import open_version
from recserve.cli import retrain
from recserve.features.history.event_kinds import EventKinds
from recserve.features.history.stores import open_store
from recserve.features.tables.event_files import SCHEMA, read_event_files
from recserve.features.tables.event_table import read_events
from recserve.service import Service
from recserve.service.event_types import EventTypes
from recserve.service.history_export import export_events
from recserve.training.options import TrainOptions
from recserve.training.recommender.recommender import train_recommender
from recserve.training.retraining import GateLimits, Guardrails, ModelTraining, RetrainConfig

HOUR_S = 3600
TOPICS = 12
FASHION_HOURS, CYCLE_HOURS = 12, 36  # how long an item is in fashion, and until it is again
ADMIN_KEY, SIGNING_KEY = "admin-key-of-the-benchmark", "signing-key-of-the-benchmark"
BROKEN, UNWANTED = "labels shuffled", "few clicks"


@dataclass(frozen=True)
class DayOptions:
    """Sizes of the day.

    Attributes:
        users: Users.
        items: Items.
        hours: Hours of the day.
        every: Hours between two retrains.
        epochs: Epochs of each training.
        slates: Slates per user and hour.
        half_life_h: Hours after which an event counts half in a training.
        drift: Share of users whose taste moves to the next topic each hour.
        seed: Seed of the day.
    """

    users: int = 2000
    items: int = 720
    hours: int = 24
    every: int = 3
    epochs: int = 2
    slates: float = 0.6
    half_life_h: float = 3.0
    drift: float = 0.04
    seed: int = 0


class World:
    """What users want now, and when it is.

    An item is wanted by users of its topic while it is in fashion, for twelve hours. Its title
    does not tell when they begin. Before the day nothing moves, and no fashion returns.
    """

    def __init__(self, options: DayOptions, start_s: float) -> None:
        self.options, self.draw = options, np.random.default_rng(options.seed)
        self.clock_s = start_s
        self.topics = self.draw.integers(0, TOPICS, options.users)
        self.item_topics = np.arange(options.items) % TOPICS
        self.begins = np.arange(options.items) // TOPICS % CYCLE_HOURS
        self.hour = 0
        self.ids = [f"item{n:05}" for n in range(options.items)]
        self.row = {item: row for row, item in enumerate(self.ids)}

    def pick(self, user: int) -> str:
        """Returns an item that a user looks for by himself."""
        return self.ids[int(self.draw.choice(np.flatnonzero(self.wanted(user))))]

    def wanted(self, user: int) -> np.ndarray:
        """Returns [I] bool, True for the items that a user wants now."""
        mine = self.item_topics == self.topics[user]
        return np.asarray(mine & ((self.hour - self.begins) % CYCLE_HOURS < FASHION_HOURS))

    def wants(self, user: int, item: str) -> bool:
        """Whether a user wants an item now."""
        return bool(self.wanted(user)[self.row[item]])

    def pass_hour(self) -> None:
        """Moves the topics of some users, and what is in fashion."""
        moved = self.draw.random(self.options.users) < self.options.drift
        self.topics[moved] = (self.topics[moved] + 1) % TOPICS
        self.clock_s += HOUR_S
        self.hour += 1

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Writes items and first events of two weeks before the day."""
        table = {
            "item_id": self.ids,
            "title": [f"Topic{t} thing {n}" for n, t in enumerate(self.item_topics.tolist())],
        }
        pq.write_table(pa.table(table), folder / "items.parquet")
        rows: dict[str, list[Any]] = {"user_id": [], "item_id": [], "timestamp": [], "type": []}
        for user in range(self.options.users):
            times = self.clock_s - self.draw.uniform(0, 14 * 24 * HOUR_S, 8)
            for moment in np.sort(times).tolist():
                rows["user_id"].append(f"u{user}")
                rows["item_id"].append(self.pick(user))
                rows["timestamp"].append(int(moment * 1e6))
                rows["type"].append("click")
        rows["timestamp"] = pa.array(rows["timestamp"], pa.timestamp("us", "UTC"))
        pq.write_table(pa.table(rows), folder / "events.parquet")
        return folder / "items.parquet", folder / "events.parquet"


class Server:
    """A server process that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, bundle: str) -> None:
        """Starts the server with a bundle and waits until it is ready."""
        settings = {
            "BUNDLE": str(self.folder / "bundles" / bundle),
            "BUNDLES_DIR": str(self.folder / "bundles"),
            "PORT": str(self.port),
            "EVENT_LOG": str(self.folder / "events.log"),
            "EVENT_LOG_ROTATE_S": "2",
            "SLATE_LOG": str(self.folder / "slates"),
            "SLATE_LOG_ROTATE_S": "2",
            "DEFAULT_TIMEOUT_MS": "30000",
            "ADMIN_KEYS": ADMIN_KEY,
            "SIGNING_KEY": SIGNING_KEY,
        }
        environment = os.environ | {f"RECSERVE_{name}": text for name, text in settings.items()}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "recserve", "serve"], env=environment, stdout=log, stderr=log
            )
        for _ in range(1200):
            try:
                if httpx.get(f"{self.url}/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self.process.poll() is not None:
                raise RuntimeError(f"the server has ended; see {self.folder / 'server.log'}")
            time.sleep(0.1)
        raise RuntimeError("the server is not ready after two minutes")

    def stop(self, how: signal.Signals) -> None:
        """Ends the server."""
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait()


class Day:
    """The day: traffic, retrains, kills and what is measured."""

    def __init__(self, options: DayOptions, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.world = World(options, time.time() - options.hours * HOUR_S - HOUR_S)
        self.items, self.events = self.world.write(folder)
        self.server = Server(folder)
        self.client = httpx.Client(base_url=self.server.url, timeout=60)
        self.acknowledged: set[tuple[str, str]] = set()
        self.unwanted: str | None = None
        self.number = self.failed = self.in_log = self.in_store = 0
        self.frozen: Service | None = None
        self.quality: list[dict[str, float]] = []
        self.runs: list[dict[str, Any]] = []
        self.busy = threading.Lock()

    def prepare(self) -> None:
        """Builds and trains the first bundle."""
        out = self.folder / "bundles" / "first"
        build_bundle(BuildOptions(self.items, self.events, out, levels=3, codes=32), lambda _: None)
        train_recommender(Bundle.open(out), TrainOptions(epochs=self.options.epochs, device="cpu"))
        shutil.copytree(out, self.folder / "frozen")
        self.frozen = Service.open(
            self.folder / "frozen", f"lmdb:{self.folder}/frozen.store", "cpu"
        )
        self.server.start("first")

    def event(self, user: int, item: str, token: str | None, moment_s: float) -> dict[str, Any]:
        """Returns an event with an id of its own."""
        self.number += 1
        event = {"user_id": f"u{user}", "item_id": item, "type": "click"}
        event |= {"event_id": f"e{self.number}", "timestamp": str(int(moment_s * 1e6))}
        return event if token is None else event | {"attribution_token": token}

    def send(self, events: list[dict[str, Any]]) -> None:
        """Sends events to both services; an acknowledged one must never be lost."""
        if not events:
            return
        answer = self.client.post("/v1/events", json={"events": events})
        if answer.status_code != 200:  # not acknowledged
            self.failed += 1
            return
        assert answer.json()["accepted"] == len(events), answer.text
        self.acknowledged |= {(event["user_id"], event["event_id"]) for event in events}
        assert self.frozen is not None
        plain = [{k: v for k, v in e.items() if k != "attribution_token"} for e in events]
        self.frozen.add_events({"events": plain})

    def visit(self, user: int) -> list[dict[str, Any]]:
        """A user looks at a slate from the top and clicks what he wants."""
        body = {"user": {"id": f"u{user}"}, "k": 10}
        answer = self.client.post("/v1/recommend", json=body)
        if answer.status_code != 200:  # a busy machine
            self.failed += 1
            return []
        said, events = answer.json(), []
        for item in said["items"]:
            looked = self.world.draw.random() < 0.9 ** (item["rank"] - 1)
            shy = self.unwanted is not None and said["model_version"] != self.unwanted
            clicks = self.world.draw.random() < (0.02 if shy else 0.4)
            if looked and clicks and self.world.wants(user, item["item_id"]):
                moment_s = self.world.clock_s + self.world.draw.uniform(0, HOUR_S)
                token = said["attribution_token"]
                events.append(self.event(user, item["item_id"], token, moment_s))
        return events

    def traffic(self, visits: int) -> None:
        """Lets some users visit, and some come by themselves."""
        draw = self.world.draw
        with self.busy:
            for user in draw.integers(0, self.options.users, visits).tolist():
                events = self.visit(user)
                if draw.random() < 0.5:
                    moment_s = self.world.clock_s + draw.uniform(0, HOUR_S)
                    events.append(self.event(user, self.world.pick(user), None, moment_s))
                self.send(events)

    def measure(self, users: int = 100) -> None:
        """Measures the share of wanted items in the slates of both services."""
        assert self.frozen is not None
        draw = np.random.default_rng(len(self.quality))
        shares: tuple[list[Any], list[Any]] = ([], [])
        for user in draw.integers(0, self.options.users, users).tolist():
            body = {"user": {"id": f"u{user}"}, "k": 10}
            headers = {"X-Recserve-Untracked": "benchmark"}
            answer = self.client.post("/v1/recommend", json=body, headers=headers).json()
            if "items" not in answer:
                continue
            frozen = self.frozen.recommend(body)
            shares[0].append(
                np.mean([self.world.wants(user, i["item_id"]) for i in answer["items"]])
            )
            shares[1].append(np.mean([self.world.wants(user, i.item_id) for i in frozen.items]))
        retrained, never = (float(np.mean(share)) for share in shares)
        hour = len(self.quality)
        self.quality.append({"hour": hour, "retrained": retrained, "never": never})
        print(f"hour {hour}: wanted items {retrained:.3f}, never retrained {never:.3f}", flush=True)

    def retrain(self, fault: str | None) -> None:
        """Retrains beside the traffic."""
        config = RetrainConfig(
            items=str(self.items),
            holdout_users=max(100, self.options.users // 4),
            events=[str(self.events)],
            event_log=str(self.folder / "events.log"),
            store=f"lmdb:{self.folder / 'bundles' / '.history'}",
            journal=str(self.folder / "bundles" / ".items"),
            bundles_dir=str(self.folder / "bundles"),
            runs=str(self.folder / "runs"),
            url=self.server.url,
            train={
                "recommender": ModelTraining(
                    epochs=self.options.epochs, half_life_days=self.options.half_life_h / 24
                )
            },
            device="cpu",
            gate=GateLimits(days=2.0, users=1000, margin=0.15, max_items_lost=0.1),
            guard=Guardrails(
                minutes=0.4,
                longest_minutes=5.0,
                every_s=2.0,
                min_requests=60,
                max_p99_factor=500.0,
                max_failed=0.05,
            ),
        )
        if fault == BROKEN:
            config = self.shuffle(config)
        if fault == UNWANTED:
            self.unwanted = self.client.get("/v1/models").json()["data"][0]["recserve"][
                "model_version"
            ]
        stop = threading.Event()

        def keep_coming() -> None:
            while not stop.wait(0.2):  # leaves processor time to the training
                self.traffic(5)

        beside = threading.Thread(target=keep_coming)
        beside.start()
        try:
            outcome = retrain.run_once(config, ADMIN_KEY, None)
        finally:
            stop.set()
            beside.join()
            self.unwanted = None
        record = json.loads(
            max(p for p in (self.folder / "runs").iterdir() if p.name.isdigit())
            .joinpath("run.json")
            .read_text()
        )
        gate = {k: v for k, v in record["gate"].items() if k != "drift"}
        self.runs.append({"fault": fault, "outcome": outcome, "gate": gate})
        print(f"retrain ({fault or 'as usual'}): {outcome}", flush=True)

    def shuffle(self, config: RetrainConfig) -> RetrainConfig:
        """Returns the settings with the items of all events shuffled."""
        from msgspec import structs

        folder = self.folder / "shuffled"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        draw = np.random.default_rng(1)
        first, log = pq.read_table(self.events), read_event_files(self.folder / "events.log")
        for table, path in (
            (first, folder / "first.parquet"),
            (log.select(SCHEMA.names), folder / "events-20261129T000000Z-0-0.parquet"),
        ):
            mixed = table.column("item_id").take(pa.array(draw.permutation(table.num_rows)))
            place = table.column_names.index("item_id")
            pq.write_table(table.set_column(place, "item_id", mixed), path)
        return structs.replace(
            config, events=[str(folder / "first.parquet")], event_log=str(folder), store=None
        )

    def kill(self) -> None:
        """Kills the server at once and starts it with the bundle that it served."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        with self.busy:
            status = self.client.get("/admin/bundle", headers=headers).json()
            self.server.stop(signal.SIGKILL)
            self.server.start(status["current"]["path"])
        print("killed and started again", flush=True)

    def run(self) -> dict[str, Any]:
        """Runs the day and returns what was measured."""
        try:
            return self._run()
        finally:
            if self.server.process is not None:
                self.server.process.kill()

    def _run(self) -> dict[str, Any]:
        started = time.monotonic()
        self.prepare()
        self.measure()
        hours, every = self.options.hours, self.options.every
        periods = hours // every
        visits = max(1, int(self.options.users * self.options.slates))
        for hour in range(1, hours + 1):
            self.world.pass_hour()
            self.traffic(visits)
            if hour % every == 0:
                number = hour // every
                fault = {periods // 2: BROKEN, periods - 1: UNWANTED}.get(number)
                self.retrain(fault)
            if hour in (hours // 3, 2 * hours // 3):
                self.kill()
            self.measure()
        lost = self.lost()
        self.server.stop(signal.SIGTERM)
        assert self.frozen is not None
        self.frozen.close()
        self.client.close()
        return {
            "options": asdict(self.options),
            "seconds": round(time.monotonic() - started, 1),
            "acknowledged": len(self.acknowledged),
            "in_event_log": self.in_log,
            "in_history_store": self.in_store,
            "lost": len(lost),
            "failed_requests": self.failed,
            "quality": self.quality,
            "runs": self.runs,
        }

    def lost(self) -> set[tuple[str, str]]:
        """Returns the acknowledged events that neither the event log nor the store has."""
        time.sleep(4)  # the log writes its last file
        bundle = Bundle.open(self.folder / "bundles" / "first")
        version = open_version(bundle, self.folder / "bundles" / ".items")
        store = open_store(f"lmdb:{self.folder / 'bundles' / '.history'}")
        export_events(store, EventTypes(store, EventKinds()), version, self.folder / "exported")
        store.close()
        from recserve.features.history.history import event_key

        sources = [self.folder / "events.log", self.folder / "exported"]
        there = []
        for folder in sources:
            table = read_event_files(folder)
            users, keys = table.column("user_id").to_pylist(), table.column("event_key").to_pylist()
            found = set(zip(users, keys, strict=True))
            there.append({(u, e) for u, e in self.acknowledged if (u, event_key(e)) in found})
        self.in_log, self.in_store = map(len, there)
        read_events(sources, bundle.catalog().items)  # a build can join them
        return self.acknowledged - there[0] - there[1]


def main() -> None:
    """Runs the day, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=DayOptions.users)
    parser.add_argument("--items", type=int, default=DayOptions.items)
    parser.add_argument("--hours", type=int, default=DayOptions.hours)
    parser.add_argument("--every", type=int, default=DayOptions.every)
    parser.add_argument("--epochs", type=int, default=DayOptions.epochs)
    parser.add_argument("--slates", type=float, default=DayOptions.slates)
    parser.add_argument("--half-life-h", type=float, default=DayOptions.half_life_h)
    parser.add_argument("--drift", type=float, default=DayOptions.drift)
    parser.add_argument("--seed", type=int, default=DayOptions.seed)
    parser.add_argument("--out", type=Path)
    given = vars(parser.parse_args())
    out = given.pop("out")
    with tempfile.TemporaryDirectory() as folder:
        found = Day(DayOptions(**given), Path(folder)).run()
    print(json.dumps({k: v for k, v in found.items() if k != "quality"}, indent=1))
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
