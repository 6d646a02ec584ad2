"""R27: schemas and grammars that crash a compiler or keep it busy, beside plain texts."""

from __future__ import annotations

import threading
from collections import Counter

import httpx
import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import LLM_NAME, ServerProcess, Site
from benchmarks.campaign.traffic import (
    COMPLETIONS,
    Body,
    count,
    latencies_ms,
    percentile,
    send,
    statuses,
    text_bodies,
)
from tests.support.hostile_grammars import HOSTILE, hostile

TOKENS, NUM_TEXTS, RATE = 20, 256, 20.0
STORM = 8  # clients that send one hostile request after another
KNOWN: Body = {"guided_regex": "[a-z]{20}", "ignore_eos": False}


@check(
    "R27",
    "hostile schemas",
    "texts with and without a constraint, while hostile schemas and grammars arrive",
    cases=400,
    minimum_s=40,
)
def hostile_schemas(site: Site, budget: Budget) -> Finding:
    """Compares the latency of other texts, and sends a new constraint into the storm."""
    random = np.random.default_rng(site.seed)
    plain = text_bodies(random, NUM_TEXTS, TOKENS)
    # Every third text has a constraint that the server knows.
    bodies = [{**body, **KNOWN} if n % 3 == 0 else body for n, body in enumerate(plain)]
    with site.server(llm=site.llm, text_timeout_ms=60_000) as server:
        send(server.url, bodies[:8], target=COMPLETIONS, workers=2)
        seconds = budget.share(0.35, 8)
        before = send(server.url, bodies, target=COMPLETIONS, rate=RATE, seconds=seconds)
        storm = _Storm(server, site.seed)
        try:
            during = send(server.url, bodies, target=COMPLETIONS, rate=RATE, seconds=seconds)
            late = server.post(
                "/v1/completions",
                {**plain[0], **KNOWN, "guided_regex": f"[a-c]{{{site.seed % 7 + 3}}}"},
            )
        finally:
            storm.end()
        alive = server.process.poll() is None
    usual, stormy = latencies_ms(before), latencies_ms(during)
    strange = sum(n for (_, status), n in storm.statuses.items() if status not in (200, 400, 429))
    return Finding(
        sum(storm.statuses.values()),
        (
            Figure("p50 in the storm / p50", percentile(stormy, 50) / percentile(usual, 50), 1.5),
            Figure("p99 in the storm / p99", percentile(stormy, 99) / percentile(usual, 99), 3),
            Figure("others without an answer", count(during, lambda status: status != 200), 0),
            Figure("hostile ones: other than 200, 400 or 429", strange, 0),
            Figure("a new constraint in the storm is answered", late.status_code == 200, 1, True),
            Figure("the server lives", alive, 1, True),
        ),
        f"p50 {percentile(usual, 50):.1f} and {percentile(stormy, 50):.1f} ms, p99 "
        f"{percentile(usual, 99):.1f} and {percentile(stormy, 99):.1f} ms, {statuses(during)}; "
        f"hostile: {dict(sorted(storm.statuses.items()))}; server and clients share the machine",
    )


class _Storm:
    """Clients that send hostile requests until the storm ends.

    Attributes:
        statuses: Number of answers by kind and status; 0 is no answer.
    """

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        self._url, self._ended, self._lock = server.url, threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._send, args=(np.random.default_rng((seed, n)),))
            for n in range(STORM)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Ends the storm, once the last requests are answered."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _send(self, random: np.random.Generator) -> None:
        fixed = {"model": LLM_NAME, "prompt": "a", "max_tokens": 2}
        with httpx.Client(base_url=self._url, timeout=90) as client:
            while not self._ended.is_set():
                kind = str(random.choice(list(HOSTILE)))
                try:
                    answer = client.post("/v1/completions", json=fixed | hostile(kind, random))
                    status = answer.status_code
                except httpx.TransportError:
                    status = 0
                with self._lock:
                    self.statuses[kind, status] += 1
