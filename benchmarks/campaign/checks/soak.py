"""R20 and R24: many requests, and the first slate of a new user."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import LLM_NAME, Site
from benchmarks.campaign.traffic import history, item, percentile
from tests.support.paths import ROOT
from tests.support.redis_server import free_port

PARTS = 10


@check(
    "R20",
    "soak",
    "varied requests with events, items and texts",
    cases=10**7,
    minimum_s=15,
    weight=4,
)
def soak(site: Site, budget: Budget) -> Finding:
    """Sends all kinds of requests, and looks for growth of memory, files, threads and latency."""
    random = np.random.default_rng(site.seed)
    done: list[tuple[float, float]] = []  # end and latency
    failed: list[str] = []
    with site.server(llm=site.llm, kv_bytes=2**24, default_timeout_ms=60_000) as server:
        stop = threading.Event()

        def run(draw: np.random.Generator) -> None:
            with server.client() as client:
                number = 0
                while not stop.is_set():
                    number += 1
                    method, path, body = varied(draw, number)
                    began = time.perf_counter()
                    answer = client.request(method, path, json=body)
                    done.append((time.perf_counter(), (time.perf_counter() - began) * 1e3))
                    if answer.status_code >= 400:
                        failed.append(f"{method} {path} {answer.status_code} {answer.text[:200]}")

        threads = [threading.Thread(target=run, args=(one,)) for one in random.spawn(4)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(budget.share(0.25, 3))  # caches and pools fill
            counts, resident = [len(done)], [server.resident_bytes()]
            files, tasks = server.num_files(), server.num_threads()
            part_s = budget.share(0.9, 3) / PARTS
            for _ in range(PARTS):
                time.sleep(part_s)
                counts.append(len(done))
                resident.append(server.resident_bytes())
            grown = server.num_files() - files, server.num_threads() - tasks
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    slope = stable_slope(counts, resident)
    measured = [ms for _, ms in sorted(done)[counts[0] : counts[-1]]]
    third = len(measured) // 3
    drift = percentile(measured[-third:], 99) / percentile(measured[:third], 99) - 1
    return Finding(
        len(done),
        (
            Figure("answers with an error", len(failed), 0),
            Figure("MiB per million requests", slope * 1e6 / 2**20, 1),
            Figure("open files more than before", grown[0], 2),
            Figure("threads more than before (pools fill)", grown[1], 8),
            Figure("p99 drift of the last third", drift, 0.05),
        ),
        f"memory {resident[0] / 2**20:.0f} to {resident[-1] / 2**20:.0f} MiB after warm-up; a "
        "slope per million needs many requests: short runs extrapolate; " + "; ".join(failed[:2]),
    )


def varied(draw: np.random.Generator, number: int) -> tuple[str, str, dict[str, object]]:
    """Returns one of nine kinds of requests."""
    user, some = {"id": f"soak{draw.integers(200)}"}, history(draw)
    event = {"user_id": user["id"], "item_id": some[0], "event_id": str(number)}
    prompt = "".join(chr(97 + n) for n in draw.integers(0, 26, 30))
    strategy = ("beam", "speculative", "nezha")[number % 3]
    slate: dict[str, object] = {"history": some, "k": 10, "strategy": strategy}
    put = {"item_id": f"soak-item-{draw.integers(100)}", "title": prompt}
    kinds: list[tuple[str, str, dict[str, object]]] = [
        ("POST", "/v1/recommend", slate),
        ("POST", "/v1/recommend", {"user": user, "k": 5}),
        ("POST", "/v1/recommend", {**slate, "filter": {"not": {"eq": ["item_id", some[0]]}}}),
        ("POST", "/v1/rank", {"history": some, "candidates": [{"item_id": x} for x in some]}),
        ("POST", "/v1/events", {"events": [event]}),
        ("POST", "/v1/completions", {"model": LLM_NAME, "prompt": prompt, "max_tokens": 4}),
        ("POST", "/v1/recommend", {**slate, "exclude": {"item_ids": [item(number)]}}),
    ]
    if number % 50 == 0:
        return "PUT", "/v1/items", {"items": [put]}
    return kinds[int(draw.integers(len(kinds)))]


def stable_slope(counts: list[int], resident: list[int]) -> float:
    """Returns the median slope over all pairs (Theil and Sen), in bytes per request."""
    pairs = [
        (resident[j] - resident[i]) / (counts[j] - counts[i])
        for i in range(len(counts))
        for j in range(i + 1, len(counts))
        if counts[j] > counts[i]
    ]
    return float(np.median(pairs)) if pairs else float("nan")


@check("R24", "cold start", "`recserve demo` with an empty cache folder", cases=3, minimum_s=150)
def cold_start(site: Site, budget: Budget) -> Finding:
    """Measures the seconds until the demo prints its first slate."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RECSERVE_")}
    firsts, statuses = [], []
    for _ in budget.cases(3):
        home = site.scratch()
        environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "recserve", "demo", "--once", "--port", str(free_port())]
        began = time.monotonic()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        first = float("inf")
        for line in process.stdout:
            if "recommend:" in line and first == float("inf"):
                first = time.monotonic() - began
        firsts.append(first)
        statuses.append(process.wait())
    return Finding(
        len(firsts),
        (
            Figure("first slate in s", max(firsts), 60),
            Figure("demos that failed", sum(bool(one) for one in statuses), 0),
        ),
        "the packages are installed; downloads of a clean install do not count",
    )
