"""R1 and R2: more requests than the server can answer, and deadlines."""

from __future__ import annotations

import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import Site
from benchmarks.campaign.traffic import (
    count,
    latencies_ms,
    percentile,
    send,
    slate_bodies,
    statuses,
)

MAX_QUEUE = 32
WARM_S = 1.5
# So wide that the engine is saturated, not the event loop that refuses the requests.
BEAM_WIDTH = 256


@check(
    "R1",
    "overload",
    "an open loop at three times the saturation rate",
    cases=600,
    minimum_s=16,
    weight=3,
)
def overload(site: Site, budget: Budget) -> Finding:
    """Compares goodput, latencies and memory under overload with those before and after."""
    bodies = slate_bodies(np.random.default_rng(site.seed), 512, beam_width=BEAM_WIDTH)
    with site.server(max_queue=MAX_QUEUE, kv_bytes=2**24) as server:
        send(server.url, bodies, workers=64, seconds=WARM_S)
        phase_s = budget.share(0.12, 2)
        peak = send(server.url, bodies, workers=16, seconds=phase_s)
        rate = len(latencies_ms(peak)) / phase_s
        steady = latencies_ms(send(server.url, bodies, rate=0.7 * rate, seconds=phase_s))
        resident = server.resident_bytes()
        seconds = budget.share(0.55, 3)
        crowd = send(server.url, bodies, rate=3 * rate, seconds=seconds)
        growth = server.resident_bytes() / resident - 1
        # What was sent while 3x lasted may still be queued: the load has dropped two seconds ago.
        send(server.url, bodies, rate=0.7 * rate, seconds=2)
        after = latencies_ms(send(server.url, bodies, rate=0.7 * rate, seconds=phase_s))
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
        f"clients share the machine; max_queue {MAX_QUEUE}",
    )


@check("R2", "deadlines", "requests with 5 to 100 ms under overload", cases=10_000, minimum_s=9)
def deadlines(site: Site, budget: Budget) -> Finding:
    """Measures answers that come after their deadline, in any status."""
    random = np.random.default_rng(site.seed)
    bodies = slate_bodies(random, 256, beam_width=50)
    timeouts = random.integers(5, 100, len(bodies)).tolist()
    bodies = [{**body, "timeout_ms": ms} for body, ms in zip(bodies, timeouts, strict=True)]
    with site.server() as server:
        send(server.url, bodies, workers=4, seconds=WARM_S)
        found = send(server.url, bodies, workers=24, seconds=budget.share(0.8, 2))
        late_ms = [
            (x.done - x.sent) * 1e3 - timeouts[x.shot % len(timeouts)] for x in found if x.status
        ]
        gone = server.metrics()['recserve_requests_failed_total{reason="deadline"}']
    return Finding(
        len(found),
        (
            Figure("answered by deadline + 10 ms", np.mean(np.array(late_ms) <= 10), 0.999, True),
            Figure("5xx but 504, or no answer", count(found, _broken), 0),
        ),
        f"{statuses(found)}; {gone:.0f} deadlines counted; lateness p99 "
        f"{percentile(late_ms, 99):.1f} ms, with the client's own delay",
    )


def _broken(status: int) -> bool:
    return status != 504 and (status >= 500 or not status)
