"""R20: many requests."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import LLM_NAME, ServerProcess, Site
from benchmarks.campaign.traffic import NUM_ITEMS, apart, history, item, percentile

PARTS = 40
NUM_PUT, NUM_USERS = 100, 200
# Events of each user before the soak. A history that grows makes its requests larger, and the heap
# with them; at this length all histories are longer than what a model reads.
NUM_EVENTS, EVENTS_PER_CALL = 1000, 5
# Caches that fill to a bound dominate the first minutes: pages of the key-value pools are touched
# for the first time, caches of filters, prefixes and words fill, threads get arenas of the
# allocator. Pages of the store's file do not count: it grows with the events that it holds, and the
# kernel can drop them.
WARM_UP, LEAST_WARM_UP_S = 0.4, 3.0
MOST_DRIFT = 0.05
JUDGED_S = 480.0  # a slope or a drift of a shorter time is shown, and not judged


@check(
    "R20",
    "soak",
    "varied requests with events, items and texts",
    cases=10**7,
    minimum_s=15,
    weight=14,
)
def soak(site: Site, budget: Budget) -> Finding:
    """Sends all kinds of requests, and looks for growth of memory, files, threads and latency."""
    random = np.random.default_rng(site.seed)
    done: list[tuple[float, float]] = []  # end and latency
    failed: list[str] = []
    with site.server(llm=site.llm, kv_bytes=2**22, default_timeout_ms=60_000) as server:
        fill_histories(server, random)
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
            cold, files_cold = server.resident_bytes("RssAnon"), server.resident_bytes("RssFile")
            time.sleep(budget.share(WARM_UP, LEAST_WARM_UP_S))
            counts, memory = [len(done)], [server.resident_bytes("RssAnon")]
            files, tasks = server.num_files(), server.num_threads()
            part_s = budget.share(0.9, 3) / PARTS
            for _ in range(PARTS):
                time.sleep(part_s)
                counts.append(len(done))
                memory.append(server.resident_bytes("RssAnon"))
            stored = server.resident_bytes("RssFile") - files_cold
            grown = server.num_files() - files, server.num_threads() - tasks
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    found = growth(counts, memory)
    judged_s = part_s * PARTS
    long_enough = judged_s >= JUDGED_S
    measured = [ms for _, ms in sorted(done)[counts[0] : counts[-1]]]
    third = len(measured) // 3
    drift = percentile(measured[-third:], 99) / percentile(measured[:third], 99) - 1
    noise = apart(measured[: third // 2], measured[third // 2 : third]) - 1
    slope = Figure("MiB per million requests", found.estimate, 1)
    steady = long_enough and noise <= MOST_DRIFT
    certain = long_enough and not found.low <= slope.bound < found.high
    return Finding(
        len(done),
        (
            Figure("answers with an error", len(failed), 0),
            replace(slope, judged=certain),
            Figure("open files more than before", grown[0], 2),
            Figure("threads more than before (pools fill)", grown[1], 8),
            Figure("p99 drift of the last third", drift, MOST_DRIFT, judged=steady),
        ),
        f"anonymous memory {cold / 2**20:.0f} MiB at start, {memory[0] / 2**20:.1f} after warm-up, "
        f"{memory[-1] / 2**20:.1f} after {judged_s / 60:.1f} minutes and "
        f"{counts[-1] - counts[0]:,} requests more; pages of files {stored / 2**20:+.1f} MiB "
        f"in all; slope {found.low:.3g} to {found.high:.3g} "
        f"(95 %), judged after {JUDGED_S / 60:.0f} minutes if the interval is on one side of the "
        f"bound; p99 of the halves of the first third {noise:.0%} apart, so the drift is "
        f"{'' if steady else 'not '}judged; " + "; ".join(failed[:2]),
    )


def fill_histories(server: ServerProcess, random: np.random.Generator) -> None:
    """Gives every user of the soak NUM_EVENTS events."""
    with server.client() as client:
        for call in range(NUM_EVENTS // EVENTS_PER_CALL):
            drawn = random.integers(0, NUM_ITEMS, (NUM_USERS, EVENTS_PER_CALL)).tolist()
            events = [
                {"user_id": f"soak{user}", "item_id": item(n), "event_id": f"before{call}.{number}"}
                for user, items in enumerate(drawn)
                for number, n in enumerate(items)
            ]
            client.post("/v1/events", json={"events": events}).raise_for_status()


def varied(draw: np.random.Generator, number: int) -> tuple[str, str, dict[str, object]]:
    """Returns one of nine kinds of requests."""
    user, some = {"id": f"soak{draw.integers(NUM_USERS)}"}, history(draw)
    event = {"user_id": user["id"], "item_id": some[0], "event_id": str(number)}
    prompt = "".join(chr(97 + n) for n in draw.integers(0, 26, 30))
    strategy = ("beam", "speculative", "nezha")[number % 3]
    slate: dict[str, object] = {"history": some, "k": 10, "strategy": strategy}
    # Old records of changed items wait for a fold of 8,192; so many make folds frequent.
    puts = [{"item_id": f"soak-item-{n}", "title": f"{prompt} {n}"} for n in range(NUM_PUT)]
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
        return "PUT", "/v1/items", {"items": puts}
    return kinds[int(draw.integers(len(kinds)))]


@dataclass(frozen=True)
class Growth:
    """MiB per million requests, with the ends of a 95 % interval."""

    estimate: float
    low: float
    high: float


def growth(counts: list[int], memory: list[int]) -> Growth:
    """Returns the median slope over all pairs of samples (Theil and Sen) with Sen's interval.

    Args:
        counts: Requests so far at each sample.
        memory: Bytes at each sample.
    """
    if len(set(counts)) < 2:
        return Growth(float("nan"), float("-inf"), float("inf"))
    slope, _, low, high = stats.theilslopes(memory, counts, 0.95)
    return Growth(*(float(one) * 1e6 / 2**20 for one in (slope, low, high)))
