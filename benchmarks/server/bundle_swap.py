"""Measures the latency of requests while the served bundle is replaced, and the memory afterwards.

    python -m benchmarks.server.bundle_swap --items 20000 [--swaps 10] [--json F]

Builds two bundles of synthetic items with untrained models and serves one of them in this process.
One client sends /v1/recommend one after the other over HTTP. It does so first without a
replacement, then during the replacements. Prints p50, p99 and maximum of both phases, the
duration of a replacement, and the resident memory after the first and after the last replacement.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np

from recserve.engine.engine_config import EngineConfig
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.service import Service, ServiceOptions
from tests.support.live_server import COLLECTOR, live
from tests.support.tiny_bundle import built, with_models

KEY = "a-key-for-this-benchmark"
ADMIN = {"Authorization": f"Bearer {KEY}"}
KV_BYTES = 2**24


class Requests:
    """A client on a thread that asks for one slate after the other.

    Attributes:
        taken_ms: Latency of each request since the last `begin`.
    """

    def __init__(self, url: str) -> None:
        self.taken_ms: list[float] = []
        self.errors = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,), daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Forgets the measured latencies."""
        self.taken_ms = []

    def end(self) -> None:
        """Stops the client."""
        self._stop.set()
        self._thread.join()

    def _run(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            number = 0
            while not self._stop.is_set():
                history = [f"item{(number * 7 + i) % 500:06d}" for i in range(8)]
                body = {"history": history, "k": 10, "strategy": "beam", "beam_width": 50}
                began = time.perf_counter()
                answer = client.post("/v1/recommend", json=body)
                self.taken_ms.append((time.perf_counter() - began) * 1e3)
                self.errors += answer.status_code != 200
                number += 1


def resident_mb() -> float:
    """Returns the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def figures(taken_ms: list[float]) -> dict[str, float]:
    """Returns p50, p99, maximum and number of latencies."""
    p50, p99 = np.percentile(taken_ms, [50, 99])
    return {
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "max_ms": round(max(taken_ms), 2),
        "requests": len(taken_ms),
    }


def replaced(client: httpx.Client, name: str) -> float:
    """Loads a bundle and returns the seconds until the old one was closed."""
    began = time.perf_counter()
    client.post("/admin/bundle:load", json={"path": name}, headers=ADMIN).raise_for_status()
    while (found := client.get("/admin/bundle", headers=ADMIN).json())["state"] == "loading":
        time.sleep(0.05)
    assert found["state"] == "ready", found
    return time.perf_counter() - began


def measured(folder: Path, num_items: int, num_swaps: int) -> dict[str, object]:
    """Runs both phases."""
    files = write_synthetic(folder / ".data", SyntheticOptions(num_items, 200, 12, seed=3))
    for number, name in enumerate(("one", "two")):
        built(files, folder / name, seed=number)
        with_models(folder / name, seed=number)
    options = ServiceOptions(engine=EngineConfig(kv_bytes=KV_BYTES), journal=folder / ".items")
    service = Service.open(folder / "one", f"lmdb:{folder}/.history", "cpu", options)
    settings = {"bundles_dir": folder, "admin_keys": [KEY], "kv_bytes": KV_BYTES}
    COLLECTOR.collect = gc.collect  # as in a server; tests leave it out
    with live(service, **settings) as client:
        requests = Requests(str(client.base_url))
        try:
            time.sleep(2)
            requests.begin()
            time.sleep(10)
            quiet = figures(requests.taken_ms)
            requests.begin()
            seconds, memory = [], []
            for number in range(num_swaps):
                seconds.append(replaced(client, ("two", "one")[number % 2]))
                memory.append(round(resident_mb()))
            during = figures(requests.taken_ms)
        finally:
            requests.end()
        assert not requests.errors
    return {
        "items": num_items,
        "without": quiet,
        "during": during,
        "swap_s": round(float(np.median(seconds)), 2),
        "resident_mb": memory,
    }


def main() -> None:
    """Parses the arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), arguments.items, arguments.swaps)
    print(json.dumps(found, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
