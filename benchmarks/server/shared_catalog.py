"""Counts what a catalogue that several servers share asks of Redis.

    python -m benchmarks.server.shared_catalog [--changes 100000] [--json F]

Two services in this process share a log in a redis-server of their own. Prints calls and bytes of a
change for the server that makes it and for one that follows, of a request, and of an idle second;
the time from a put until the other server has it; and the start of a server behind many changes,
once from the log and once from its snapshot.

Calls are those that a client sends, not those of scripts. Times depend on the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import redis

from benchmarks.support.runs import machine, write_json
from recserve.bundle.building import BuildOptions, build_bundle
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.schemas.items import ItemsRequest, RecommendRequest
from recserve.service import Service, ServiceOptions
from recserve.service.options import CatalogLogOptions
from tests.support.redis_server import servers, start_redis
from tests.support.tiny_bundle import with_models

SENT = ("evalsha", "eval", "xread", "hgetall", "hmget", "wait", "ping")
TIMES, PER_CHANGE, IDLE_S = 100, 1000, 5.0
OPTIONS = CatalogLogOptions("redis")


class Counter:
    """Counts what a redis-server is asked."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def _read(self) -> np.ndarray:
        calls: Any = self._client.info("commandstats")
        stats: Any = self._client.info("stats")
        sent = sum(calls.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in SENT)
        read, written = (stats[f"total_net_{way}_bytes"] for way in ("input", "output"))
        return np.array([sent, read, written], dtype=float)

    @contextmanager
    def over(self, times: float) -> Iterator[dict[str, float]]:
        """Yields a table that has calls and bytes per time once the context has ended."""
        found: dict[str, float] = {}
        self._read()
        before = self._read()
        own = self._read() - before  # what counting itself takes
        before += own
        yield found
        counts = (self._read() - before - own) / times
        names = ("calls", "bytes to Redis", "bytes from Redis")
        pairs = zip(names, counts.tolist(), strict=True)
        found |= {name: round(max(0.0, each), 1) for name, each in pairs}


def built(folder: Path) -> Path:
    """Builds a bundle of 2,000 items whose semantic ids leave room for many more."""
    files = write_synthetic(folder / "data", SyntheticOptions(2000, 100, 12, seed=3))
    options = BuildOptions(
        files.items,
        files.events,
        folder / "bundle",
        levels=2,
        codes=64,
        text_dim=16,
        collaborative_dim=0,
    )
    build_bundle(options, log=lambda _: None)
    return with_models(folder / "bundle")


def put(service: Service, first: int, count: int) -> str:
    """Puts items with drawn vectors."""
    draw = np.random.default_rng(first)
    items: list[dict[str, Any]] = [
        {"item_id": f"new{number}", "title": "Rose", "embedding": draw.normal(size=16).tolist()}
        for number in range(first, first + count)
    ]
    answer = service.put_items(ItemsRequest(items=items))
    if answer.rejected:
        raise RuntimeError(answer.rejected[0].reason)
    return answer.catalog_version


def measure(folder: Path, num_changes: int) -> dict[str, Any]:
    """Returns all figures."""
    with ExitStack() as stack:
        started = stack.enter_context(servers())
        server, port = start_redis(folder)
        started.append(server)
        client = stack.enter_context(redis.Redis(port=port))
        counter, bundle, url = Counter(client), built(folder), f"redis://127.0.0.1:{port}/0"

        def open_service() -> Service:
            options = ServiceOptions(catalog_log=OPTIONS)
            return Service.open(bundle, url, "cpu", options)

        one, other = (stack.enter_context(open_service()) for _ in "ab")
        found: dict[str, Any] = {}
        with counter.over(2 * IDLE_S) as found["an idle second of a server"]:
            time.sleep(IDLE_S)
        seconds = []
        with counter.over(TIMES) as both:
            for number in range(TIMES):
                began = time.perf_counter()
                put(one, number, 1)
                wanted = one.catalog.current.items.number
                while other.catalog.current.items.number < wanted:
                    time.sleep(0.0001)
                seconds.append(time.perf_counter() - began)
        found["milliseconds from a put until the other server has it"] = {
            "median": round(1e3 * median(seconds), 2),
            "longest": round(1e3 * max(seconds), 2),
        }
        for each in (one, other):
            follower = each.catalog.follower
            assert follower is not None
            follower.close()
        with counter.over(TIMES) as alone:
            for number in range(TIMES):
                put(one, TIMES + number, 1)
        found["a change of one item, with another server that follows"] = both
        found["a change of one item, the server that makes it"] = alone
        body = RecommendRequest(history=other.catalog.current.catalog.items.ids[:3], k=10)
        with counter.over(TIMES) as found["a recommendation without a stored history"]:
            for _ in range(TIMES):
                other.recommend(body)
        for first in range(2 * TIMES, num_changes, PER_CHANGE):
            put(one, first, min(PER_CHANGE, num_changes - first))
        found["start from the log"] = _start(counter, open_service)
        one.catalog._condense(one.catalog.current.items)
        found["start from the snapshot"] = _start(counter, open_service)
        found["megabytes of the snapshot"] = round(
            client.memory_usage("recserve:items:{items}:snapshot", samples=0) / 1e6, 1
        )
        return found


def _start(counter: Counter, open_service: Any) -> dict[str, float]:
    """Starts a server once more; returns its figures."""
    with counter.over(1) as counts:
        began = time.perf_counter()
        service = open_service()
        taken_s = time.perf_counter() - began
        changed = int(service.catalog.current.items.record_rows.size)
    service.close()
    return {**counts, "seconds": round(taken_s, 2), "changed items": changed}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.changes)
    for name, figures in found.items():
        print(f"{name}: {figures}")
    if arguments.json is not None:
        write_json(arguments.json, {"machine": machine(), "changes": arguments.changes, **found})


if __name__ == "__main__":
    main()
