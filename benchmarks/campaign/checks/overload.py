"""R1 and R2: more requests than the server can answer, and deadlines."""

from __future__ import annotations

import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import Site
from benchmarks.campaign.traffic import (
    COMPLETIONS,
    count,
    latencies_ms,
    percentile,
    send,
    statuses,
    text_bodies,
)
from recserve.load.generator import HttpExchange

# A text that is accepted under overload shares its steps with as many as may run, and waits for as
# many as may queue: both bound its latency.
MAX_RUNNING = 8
MAX_QUEUE = 2
CROWD = MAX_RUNNING + MAX_QUEUE  # clients of a closed loop that keep the engine full
WARM_S = 2.0
# Texts, so that the engine is saturated, and not the event loop that refuses the requests. Their
# lengths differ: texts of one length that begin together also end together, and then the next ones
# wait for up to a whole text.
TOKENS, SPREAD = 600, 300
SHORT_TOKENS = 50
NUM_TEXTS = 512


@check(
    "R1",
    "overload",
    "an open loop of texts at three times the saturation rate",
    cases=600,
    minimum_s=20,
    weight=3,
)
def overload(site: Site, budget: Budget) -> Finding:
    """Compares goodput, latencies and memory under overload with those before and after."""
    random = np.random.default_rng(site.seed)
    lengths = random.integers(TOKENS - SPREAD, TOKENS + SPREAD, NUM_TEXTS).tolist()
    texts_of = text_bodies(random, NUM_TEXTS, TOKENS)
    bodies = [{**body, "max_tokens": n} for body, n in zip(texts_of, lengths, strict=True)]
    limits = {
        "max_running": MAX_RUNNING,
        "max_queue": MAX_QUEUE,
        "queue_share": 1.0,
        "kv_bytes": 2**24,
    }
    with site.server(llm=site.llm, **limits) as server:

        def texts(seconds: float, **how: float) -> tuple[HttpExchange, ...]:
            return send(server.url, bodies, target=COMPLETIONS, seconds=seconds, **how)

        texts(WARM_S, workers=CROWD)
        phase_s = budget.share(0.12, 3)
        peak = texts(phase_s, workers=CROWD)
        rate = len(latencies_ms(peak)) / max(one.done for one in peak)
        steady = latencies_ms(texts(phase_s, rate=0.7 * rate))
        resident = server.resident_bytes()
        seconds = budget.share(0.5, 3)
        crowd = texts(seconds, rate=3 * rate)
        growth = server.resident_bytes() / resident - 1
        texts(2, rate=0.7 * rate)  # the load has dropped two seconds before the next phase
        after = latencies_ms(texts(phase_s, rate=0.7 * rate))
    usual_ms = percentile(steady, 99)
    refusals = [(x.done - x.sent) * 1e3 for x in crowd if x.status == 429]
    answers = [(x.done - x.sent) * 1e3 for x in crowd if x.status == 200]
    ended_s = max(x.done for x in crowd)
    return Finding(
        int(seconds),
        (
            Figure("goodput / peak", len(answers) / ended_s / rate, 0.9, at_least=True),
            Figure("accepted p99 / p99 at 70 %", percentile(answers, 99) / usual_ms, 2),
            Figure("refused p99 in ms", percentile(refusals, 99) if refusals else 0.0, 5),
            Figure("resident memory grows by", growth, 0.02),
            Figure("5xx or no answer", count(crowd, lambda s: s >= 500 or not s), 0),
            Figure("p99 2 s later / p99 before", percentile(after, 99) / usual_ms, 1.2),
        ),
        f"peak {rate:.0f}/s, p99 {usual_ms:.1f} ms at 70 %, {statuses(crowd)}; server and "
        f"clients share the machine; max_running {MAX_RUNNING}, max_queue {MAX_QUEUE}",
    )


@check("R2", "deadlines", "texts with 20 to 400 ms under overload", cases=10_000, minimum_s=9)
def deadlines(site: Site, budget: Budget) -> Finding:
    """Measures answers that come after their deadline, in any status."""
    random = np.random.default_rng(site.seed)
    bodies = text_bodies(random, 256, SHORT_TOKENS)
    timeouts = random.integers(20, 400, len(bodies)).tolist()
    timed = [{**body, "timeout_ms": ms} for body, ms in zip(bodies, timeouts, strict=True)]
    with site.server(llm=site.llm) as server:
        send(server.url, bodies, target=COMPLETIONS, workers=4, seconds=WARM_S)
        seconds = budget.share(0.8, 3)
        found = send(server.url, timed, target=COMPLETIONS, workers=16, seconds=seconds)
        late_ms = [
            (x.done - x.sent) * 1e3 - timeouts[x.shot % len(timeouts)] for x in found if x.status
        ]
        gone = server.metrics()['recserve_requests_failed_total{reason="deadline"}']
    return Finding(
        len(found),
        (
            Figure(
                "answered by deadline + 10 ms",
                float(np.mean(np.array(late_ms) <= 10)),
                0.999,
                at_least=True,
            ),
            Figure("5xx but 504, or no answer", count(found, _broken), 0),
        ),
        f"{statuses(found)}; {gone:.0f} deadlines counted; lateness p99 "
        f"{percentile(late_ms, 99):.1f} ms, with the client's own delay",
    )


def _broken(status: int) -> bool:
    return status != 504 and (status >= 500 or not status)
