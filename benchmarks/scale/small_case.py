"""Checks the simulated replica against one real server, and measures the costs of its steps.

    python -m benchmarks.scale.small_case --json small.json

Starts `recserve serve` with one thread and an untrained recommender of the default size over a
synthetic catalogue, because neither training nor taste changes what a slate costs. Closed loops
with 1, 8 and 32 clients and with cached and uncached users give the costs of a step by least
squares. Then Poisson arrivals of unequally active users go to the server and, the very same ones,
to the simulated replica. Prints throughput, p50, p99 and the share of cached users of both. The
client is a process of its own; the machine needs two quiet cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from benchmarks.scale.replica import ReplicaShape, SimulatedReplica, StepCosts
from benchmarks.scale.traffic import Arrivals
from benchmarks.support.runs import machine
from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.recommender import Recommender, save_recommender

NUM_ITEMS, NUM_USERS, MEAN_EVENTS, HISTORY_ITEMS = 5000, 4000, 40, 50
LAYERS, WIDTH, PAGE = 2, 192, 16
CLIENTS = (1, 8, 32)
EXPONENT = 0.8
READY_S = 120.0


@dataclass(frozen=True)
class World:
    """What the load asks for.

    Attributes:
        bundle: The bundle.
        histories: Item ids of each user, oldest first.
        user_ids: Id of each user.
        cached_users: Users whose prefixes the KV cache of the server holds.
        kv_bytes: Size of that cache.
    """

    bundle: Path
    histories: list[list[str]]
    user_ids: list[str]
    cached_users: int
    kv_bytes: int

    def body(self, user: int, items: int | None = None) -> dict[str, Any]:
        """Returns a request; `items` sends that many of the user's items instead of the id."""
        asked = {"k": 20, "strategy": "beam", "explain": True}
        if items is None:
            return {"user": {"id": self.user_ids[user]}, **asked}
        return {"history": self.histories[user][:items], **asked}


def make_world(folder: Path, cached_users: int) -> World:
    """Builds a synthetic catalogue with an untrained recommender of the default size."""
    files = write_synthetic(folder / "data", SyntheticOptions(NUM_ITEMS, NUM_USERS, MEAN_EVENTS))
    out = folder / "bundle"
    build_bundle(BuildOptions(files.items, files.events, out), log=lambda _: None)
    bundle = Bundle.open(out)
    catalog = bundle.catalog()
    torch.manual_seed(0)
    config = RecommenderConfig(
        DecoderConfig(WIDTH, LAYERS, 3, 3, 64, 4 * WIDTH),
        catalog.semantic_ids.codebook_sizes,
        num_items=NUM_ITEMS,
        vector_dim=catalog.vectors.shape[1],
        id_embedding=True,
        dense_head=True,
        max_history_items=HISTORY_ITEMS,
    )
    save_recommender(Recommender(config), bundle.directory("recommender"))
    bundle.commit("recommender", {})
    events = bundle.events()
    ids = catalog.items.ids
    histories = [
        [ids[row] for row in rows.tolist()]
        for rows in np.split(events.item_rows, events.offsets[1:-1])
    ]
    pages = np.mean([-(-(1 + min(len(one), HISTORY_ITEMS)) // PAGE) for one in histories])
    page_bytes = PAGE * LAYERS * 2 * WIDTH * 4
    return World(
        out, histories, list(events.user_ids), cached_users, int(cached_users * pages * page_bytes)
    )


@contextmanager
def server(world: World, port: int) -> Iterator[tuple[str, int]]:
    """Runs `recserve serve` with one thread; yields its address and process id."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RECSERVE_KV_BYTES": str(world.kv_bytes)}
    command = [sys.executable, "-m", "recserve", "serve", "--bundle", str(world.bundle)]
    command += ["--device", "cpu", "--port", str(port)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()


async def wait_ready(session: aiohttp.ClientSession, url: str) -> None:
    """Waits until the server takes requests. Raises TimeoutError."""
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        try:
            async with session.get(f"{url}/health/ready") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the server was not ready within {READY_S:.0f} s")


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bool:
    """Sends a request; returns True if the user's whole prefix was cached."""
    async with session.post(f"{url}/v1/recommend", json=body) as answer:
        answer.raise_for_status()
        work = (await answer.json())["explanation"]
        return bool(work["root_tokens_cached"] > work["root_tokens_computed"])


async def closed(
    session: aiohttp.ClientSession, url: str, bodies: list[dict[str, Any]], clients: int
) -> float:
    """Returns the seconds per `clients` requests, with so many always in progress."""
    waiting = iter(bodies)

    async def client() -> None:
        for body in waiting:
            await ask(session, url, body)

    began_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return (time.perf_counter() - began_s) / len(bodies) * clients


async def measure_costs(
    session: aiohttp.ClientSession, url: str, world: World, requests: int
) -> StepCosts:
    """Measures the costs of a step with closed loops.

    Args:
        session: Connections.
        url: Address of the server.
        world: What is asked for.
        requests: Requests per loop.
    """
    warm_users = list(range(world.cached_users // 4))
    warm = [world.body(user) for user in warm_users]
    longer = [user for user in warm_users if 2 <= len(world.histories[user]) < HISTORY_ITEMS]
    rows, seconds = [], []
    next_cold = 0
    for clients in CLIENTS:
        # Users in turns, and more of them than the cache holds: each has been evicted.
        cold = [world.body((next_cold + n) % NUM_USERS) for n in range(requests)]
        next_cold += requests
        rows.append((1, 0, 0, clients))
        seconds.append(await closed(session, url, cold, clients))
        await closed(session, url, warm, 8)
        rows.append((1, clients, 0, 0))
        many = (warm * (requests // len(warm) + 1))[:requests]
        seconds.append(await closed(session, url, many, clients))
        short = [world.body(user, len(world.histories[user]) - 1) for user in longer]
        await closed(session, url, short, 8)
        rows.append((1, 0, clients, 0))
        full = [world.body(user, len(world.histories[user])) for user in longer]
        seconds.append(await closed(session, url, full, clients))
    scale = np.array([max(row[1:]) for row in rows], dtype=float)
    solved, *_ = np.linalg.lstsq(
        np.array(rows) / scale[:, None], np.array(seconds) / scale, rcond=None
    )
    return StepCosts(*(float(max(0.0, one)) * 1e3 for one in solved))


def draw_arrivals(rate: float, seconds: float, seed: int) -> Arrivals:
    """Returns Poisson arrivals of unequally active users."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate * seconds)
    weights = (np.arange(NUM_USERS) + 20.0) ** -EXPONENT
    ranks = rng.permutation(NUM_USERS)
    users = ranks[rng.choice(NUM_USERS, count, p=weights / weights.sum())]
    times = np.sort(rng.random(count)) * seconds
    return Arrivals(times, users, np.zeros(count), np.zeros(count, dtype=bool))


async def open_loop(
    session: aiohttp.ClientSession, url: str, world: World, arrivals: Arrivals
) -> tuple[np.ndarray, np.ndarray]:
    """Sends requests at their times; returns latencies in s from there, and which were cached."""
    origin_s = time.perf_counter() + 0.2

    async def one(at_s: float, user: int) -> tuple[float, bool]:
        await asyncio.sleep(max(0.0, origin_s + at_s - time.perf_counter()))
        hit = await ask(session, url, world.body(user))
        return time.perf_counter() - origin_s - at_s, hit

    pairs = zip(arrivals.times_s.tolist(), arrivals.users.tolist(), strict=True)
    done = await asyncio.gather(*(one(at_s, user) for at_s, user in pairs))
    return np.array([latency for latency, _ in done]), np.array([hit for _, hit in done])


def cpu_seconds(process: int) -> float:
    """Returns the processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def figures(
    latencies_s: np.ndarray, hits: float, use: float, times_s: np.ndarray
) -> dict[str, float]:
    """Returns the compared figures; the rate counts from the first request to the last answer."""
    return {
        "use": use,
        "rate": latencies_s.size / float((times_s + latencies_s).max() - times_s[0]),
        "p50_ms": float(np.percentile(latencies_s, 50)) * 1e3,
        "p99_ms": float(np.percentile(latencies_s, 99)) * 1e3,
        "hit_share": hits,
    }


async def compare(
    options: argparse.Namespace, world: World, url: str, process: int
) -> dict[str, Any]:
    """Measures costs, then compares server and simulation at each load."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await wait_ready(session, url)
        costs = await measure_costs(session, url, world, options.requests)
        print("costs in ms:", {name: round(ms, 3) for name, ms in asdict(costs).items()})
        rows = []
        for number, load in enumerate(options.loads):
            rate = load * 1e3 / costs.mean_ms(0.5, 0.0, 4)
            # The first half fills both caches.
            arrivals = draw_arrivals(rate, 2 * options.seconds, number)
            half = arrivals.times_s >= options.seconds
            before = cpu_seconds(process)
            latencies, hits = await open_loop(session, url, world, arrivals)
            use = (cpu_seconds(process) - before) / (2 * options.seconds)
            real = figures(latencies[half], float(hits[half].mean()), use, arrivals.times_s[half])
            shape = ReplicaShape(costs, world.cached_users, deadline_s=60.0)
            simulated = SimulatedReplica(shape)
            first = simulated.serve(arrivals.where(~half))
            done = simulated.serve(arrivals.where(half))
            share = done.hits / max(1, done.latencies_s.size)
            use = (first.busy_s + done.busy_s) / (2 * options.seconds)
            predicted = figures(done.latencies_s, share, use, arrivals.times_s[half])
            rows.append({"load": load, "rate": rate, "real": real, "simulated": predicted})
            words = [f"{n}: {real[n]:.3g} real, {predicted[n]:.3g} simulated" for n in real]
            print(f"load {load:.2f}, {rate:.0f} requests/s:", "; ".join(words), flush=True)
    return {"costs": asdict(costs), "loads": rows, "machine": machine()}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cached-users", type=int, default=800, help="size of the KV cache")
    parser.add_argument("--requests", type=int, default=400, help="requests per closed loop")
    parser.add_argument("--seconds", type=float, default=15.0, help="measured seconds per load")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("--port", type=int, default=8093, help="port of the server")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder), options.cached_users)
        with server(world, options.port) as (url, process):
            found = asyncio.run(compare(options, world, url, process))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
