"""Simulates a day of a fleet of replicas: replicas, cache hits, latency, autoscaling, an outage.

    python -m benchmarks.scale.day                         # 100,000 requests/s at the peak
    python -m benchmarks.scale.day --cached-users 9600 --png day.png --json day.json
    python -m benchmarks.scale.day --outage-share 0.33 --outage-hour 20

One replica of the fleet is simulated request by request (benchmarks/scale/traffic.py says why that
is sound). The number of replicas follows its load as a Kubernetes autoscaler would: once a minute,
up after the start of new replicas, down to the most that the last five minutes needed. `--sampled`
repeats it for other replicas, which have other users. The default costs are those of one processor
core; benchmarks.scale.small_case measures yours. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.scale.replica import ReplicaShape, SimulatedReplica, StepCosts
from benchmarks.scale.traffic import HOUR_S, ReplicaTraffic, Traffic

# One thread of an AMD EPYC (Zen 5), processor time, float32: beam 50, k 50, 256 x 4, 201 tokens of
# history, batches of 1, 8 and 32 (`python -m benchmarks.recommend.strategies --strategies beam
# --batches 1 8 32 --no-generate --threads 1 --clock cpu`), and 0.6 ms of HTTP per request.
FIXED_MS, WARM_MS, EVENT_MS, COLD_MS = 2.2, 5.4, 6.2, 16.0
# 8 GB of keys and values in float32, 1.7 MB per user.
CACHED_USERS = 4800
WINDOW_S = 60.0
DOWN_WINDOWS = 5
TOLERANCE = 0.1


@dataclass(frozen=True)
class Scaling:
    """How the number of replicas follows the load.

    Attributes:
        target: Share of its time that a replica should work.
        start_s: Time from the decision to a new replica's first request.
        outage_share: Share of the replicas that fail together; their successors start at once.
        outage_s: Time of the failure; nan for none.
    """

    target: float = 0.6
    start_s: float = 120.0
    outage_share: float = 0.0
    outage_s: float = math.nan


class Fleet:
    """The number of replicas over the day."""

    def __init__(self, scaling: Scaling, replicas: int, fewest: int) -> None:
        """Starts with a number of replicas and never has fewer than `fewest`."""
        self.scaling = scaling
        self.running = max(replicas, fewest)
        self.fewest = fewest
        self._starting: deque[tuple[float, int]] = deque()
        self._wanted: deque[int] = deque(maxlen=DOWN_WINDOWS)

    def serving(self, time_s: float) -> float:
        """Returns the replicas that take requests; in an outage some of the running ones do not."""
        while self._starting and self._starting[0][0] <= time_s:
            self.running = max(self.running, self._starting.popleft()[1])
        out = self.scaling.outage_s <= time_s < self.scaling.outage_s + self.scaling.start_s
        return max(self.fewest, self.running * (1 - self.scaling.outage_share * out))

    def observe(self, time_s: float, serving: float, use: float) -> None:
        """Changes the number for the share of its time that a replica worked in the window."""
        ratio = use / self.scaling.target
        wanted = math.ceil(serving * ratio) if abs(ratio - 1) > TOLERANCE else self.running
        self._wanted.append(min(max(wanted, self.fewest), 2 * self.running))
        if self._wanted[-1] > self.running:
            self._starting.append((time_s + self.scaling.start_s, self._wanted[-1]))
        elif len(self._wanted) == DOWN_WINDOWS and max(self._wanted) < self.running:
            self.running = max(self._wanted)


def fewest_replicas(traffic: Traffic, shape: ReplicaShape, hours: int) -> int:
    """Returns a number below what any minute needs: all users cached, all batches full."""
    quietest = min(traffic.rate(hour * HOUR_S) for hour in range(hours))
    best_ms = shape.costs.mean_ms(1.0, 0.0, shape.max_batch)
    return max(1, int(quietest * best_ms / 1e3))


def simulate(
    traffic: Traffic, shape: ReplicaShape, scaling: Scaling, affinity: bool, seed: int, hours: int
) -> list[dict[str, float]]:
    """Simulates one replica.

    Args:
        traffic: What users do.
        shape: Limits of a replica.
        scaling: How the number of replicas follows the load.
        affinity: True for consistent hashing of users, False for random routing.
        seed: Another seed is another replica, with other users.
        hours: Hours from midnight.

    Returns:
        One row per hour.
    """
    rng = np.random.default_rng([seed, int(affinity)])
    fewest = fewest_replicas(traffic, shape, hours)
    guess_ms = shape.costs.mean_ms(0.5, traffic.event_share, 2)
    fleet = Fleet(scaling, math.ceil(traffic.rate(0) * guess_ms / 1e3 / scaling.target), fewest)
    replica = SimulatedReplica(shape)
    rows = []
    for hour, drawn in enumerate(ReplicaTraffic(traffic, fewest, affinity, rng).hours(hours)):
        served, counts = [], []
        for minute in range(60):
            start_s = hour * HOUR_S + minute * WINDOW_S
            first, last = np.searchsorted(drawn.times_s, [start_s, start_s + WINDOW_S])
            serving = fleet.serving(start_s)
            window = drawn.where(slice(first, last))
            done = replica.serve(window.where(window.claims < 1 / serving))
            fleet.observe(start_s, serving, done.busy_s / WINDOW_S)
            served.append(done)
            counts.append(serving)
        latencies = np.concatenate([one.latencies_s for one in served])
        refused, hits = sum(one.refused for one in served), sum(one.hits for one in served)
        rows.append(
            {
                "hour": hour,
                "rate": float(np.mean([traffic.rate((hour + m / 60) * HOUR_S) for m in range(60)])),
                "replicas": float(np.mean(counts)),
                "most_replicas": float(max(counts)),
                "requests": int(latencies.size + refused),
                "hit_share": hits / max(1, latencies.size),
                "use": sum(one.busy_s for one in served) / HOUR_S,
                "p50_ms": _percentile_ms(latencies, 50),
                "p99_ms": _percentile_ms(latencies, 99),
                "refused_share": refused / max(1, latencies.size + refused),
            }
        )
    return rows


def _percentile_ms(latencies_s: np.ndarray, share: float) -> float:
    return float(np.percentile(latencies_s, share)) * 1e3 if latencies_s.size else math.nan


def mean_rows(runs: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Returns the mean of each figure over the sampled replicas."""
    return [
        {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        for rows in zip(*runs, strict=True)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    options = _options().parse_args(arguments)
    traffic = Traffic(
        peak_rate=options.rate,
        num_users=options.users,
        exponent=options.exponent,
        session_requests=options.session_requests,
        session_gap_s=options.session_gap_s,
        event_share=options.event_share,
    )
    costs = StepCosts(options.fixed_ms, options.warm_ms, options.event_ms, options.cold_ms)
    shape = ReplicaShape(costs, options.cached_users, options.max_batch, options.deadline_s)
    outage_s = options.outage_hour * HOUR_S if options.outage_share else math.nan
    scaling = Scaling(options.target, options.start_s, options.outage_share, outage_s)
    found = {}
    for name, affinity in (("affinity", True), ("random", False)):
        seeds = range(options.seed, options.seed + options.sampled)
        runs = [simulate(traffic, shape, scaling, affinity, s, options.hours) for s in seeds]
        found[name] = mean_rows(runs)
    _print(found)
    settings = {"traffic": asdict(traffic), "shape": asdict(shape), "scaling": asdict(scaling)}
    if options.json:
        options.json.write_text(json.dumps({"settings": settings, "hours": found}, indent=1))
    if options.png:
        draw(found, options.png)
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    whole, part = int, float
    for name, kind, default, text in (
        ("rate", part, 100_000.0, "requests per second at the peak"),
        ("users", whole, 100_000_000, "users who may come"),
        ("exponent", part, 0.8, "how unequally users are active"),
        ("session-requests", part, 8.0, "mean requests of a session"),
        ("session-gap-s", part, 30.0, "mean seconds between two of them"),
        ("event-share", part, 0.3, "share of requests with a new event before them"),
        ("fixed-ms", part, FIXED_MS, "time of a batch, whatever it holds"),
        ("warm-ms", part, WARM_MS, "more for each user who is cached"),
        ("event-ms", part, EVENT_MS, "more for each cached user with a new event"),
        ("cold-ms", part, COLD_MS, "more for each user who is not cached"),
        ("cached-users", whole, CACHED_USERS, "prefixes that a replica's cache holds"),
        ("max-batch", whole, 32, "most requests of a batch"),
        ("deadline-s", part, 1.0, "longest wait of a request"),
        ("target", part, 0.6, "share of its time that a replica should work"),
        ("start-s", part, 120.0, "start of a replica"),
        ("outage-share", part, 0.0, "share of the replicas that fail together"),
        ("outage-hour", part, 20.0, "when they fail"),
        ("sampled", whole, 1, "replicas that are simulated"),
        ("seed", whole, 0, "of the draws"),
        ("hours", whole, 24, "hours from midnight"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} ({default})")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--png", type=Path, help="draw them; needs matplotlib")
    return parser


def _print(found: dict[str, list[dict[str, float]]]) -> None:
    table = Table(title="one replica of the fleet, by hour; affinity / random")
    for name in ("hour", "requests/s", "replicas", "hit share", "use", "p50 ms", "p99 ms", "late"):
        table.add_column(name, justify="right")
    for sticky, spread in zip(found["affinity"], found["random"], strict=True):
        pairs = [
            (f"{sticky[name]:{how}}", f"{spread[name]:{how}}")
            for name, how in (
                ("replicas", ",.0f"),
                ("hit_share", ".1%"),
                ("use", ".0%"),
                ("p50_ms", ".1f"),
                ("p99_ms", ".0f"),
                ("refused_share", ".2%"),
            )
        ]
        cells = [" / ".join(pair) for pair in pairs]
        table.add_row(f"{sticky['hour']:.0f}", f"{sticky['rate']:,.0f}", *cells)
    console = Console(width=140)
    console.print(table)
    for name, rows in found.items():
        hours = sum(row["replicas"] for row in rows)
        most = max(row["most_replicas"] for row in rows)
        hits = np.average([r["hit_share"] for r in rows], weights=[r["rate"] for r in rows])
        console.print(f"{name}: {hours:,.0f} replica hours, most {most:,.0f}, hits {hits:.1%}")


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws replicas, hit share and p99 by hour into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    panels = (
        ("replicas", "replicas"),
        ("hit_share", "share of cached users"),
        ("p99_ms", "p99, ms"),
    )
    for axis, (name, title) in zip(axes, panels, strict=True):
        for routing, rows in found.items():
            axis.plot([row["hour"] for row in rows], [row[name] for row in rows], label=routing)
        axis.set(title=title, xlabel="hour", ylim=(0, None))
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
