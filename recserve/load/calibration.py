"""What the load generator itself costs, measured against a server that answers at once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np

from recserve.load.generator import Call, HttpExchange, LoadOptions, Shot, drive, poisson_arrivals
from recserve.load.targets import Items

BODY = b'{"user":{"id":"u00001"},"k":10}'
WORKERS = 16
SECONDS = 2.0
MAX_SHOTS = 20_000
CAPACITY_SHOTS = 4000
# The generator is reported as late where its sends are later than this, or this share of p50.
LATE_MS = 5.0
LATE_SHARE = 0.1


@dataclass(frozen=True)
class Lateness:
    """How long after their scheduled times requests were sent, in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float

    def warning(self, latency_p50_ms: float) -> str | None:
        """Returns a sentence if the generator was late compared with what it measured."""
        limit = max(LATE_MS, LATE_SHARE * latency_p50_ms)
        if not self.p99_ms > limit:
            return None
        return (
            f"the load generator was late: 1 % of the sends left more than {self.p99_ms:.1f} ms "
            f"after their time (limit {limit:.1f} ms); lower the rate, raise the limit on requests "
            "in flight, or run the generator on another machine"
        )


@dataclass(frozen=True)
class Overhead:
    """The generator against a server that answers at once.

    Attributes:
        capacity_per_s: Requests per second in a closed loop, beside the server on one machine.
        cpu_ms: Processor time of the generator per request.
        latency_p50_ms: Latency in an open loop at the rate of the run.
        latency_p99_ms: The same, 99th percentile.
        lateness: Of the sends in that open loop.
    """

    capacity_per_s: float
    cpu_ms: float
    latency_p50_ms: float
    latency_p99_ms: float
    lateness: Lateness


def lateness(exchanges: tuple[HttpExchange, ...]) -> Lateness:
    """Returns the lateness of first calls; later calls of a pair have no time of their own."""
    late = [(one.sent - one.scheduled) * 1e3 for one in exchanges if one.place == 0]
    p50, p99, most = np.percentile(late, [50, 99, 100]) if late else (0.0, 0.0, 0.0)
    return Lateness(p50_ms=float(p50), p99_ms=float(p99), max_ms=float(most))


async def measure_overhead(rate: float, seed: int = 0) -> Overhead:
    """Measures the generator at a rate per second, in about four seconds.

    Raises:
        RuntimeError: If the server does not start.
    """
    command = [sys.executable, "-m", "recserve.load.calibration_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            port = (process.stdout.readline() if process.stdout else b"").strip()
            if not port:
                raise RuntimeError("the calibration server did not start")
            url = f"http://127.0.0.1:{int(port)}/v1/recommend"
            target = Items(name="recommend", path="/v1/recommend")
            call = Call(url=url, body=BODY)
            flat = [Shot(at_s=0.0, calls=(call,))] * CAPACITY_SHOTS
            fast = await drive(flat, target, LoadOptions(workers=WORKERS))
            times = poisson_arrivals(rate, SECONDS, seed)[:MAX_SHOTS]
            paced = [Shot(at_s=float(time), calls=(call,)) for time in times]
            slow = await drive(paced, target, LoadOptions())
        finally:
            if process.stdin:
                process.stdin.close()
    p50, p99 = np.percentile([one.latency_ms for one in slow.exchanges] or [0.0], [50, 99])
    return Overhead(
        capacity_per_s=len(fast.exchanges) / fast.seconds,
        cpu_ms=fast.cpu_seconds / len(fast.exchanges) * 1e3,
        latency_p50_ms=float(p50),
        latency_p99_ms=float(p99),
        lateness=lateness(slow.exchanges),
    )
