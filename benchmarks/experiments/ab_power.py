"""Does `recserve ab` keep its promises? False alarms and power on a recorded latency trace.

    python -m benchmarks.experiments.ab_power --trace RECORDS.parquet [--replays 1000] [--json F]
    python -m benchmarks.experiments.ab_power                          a drawn trace instead

RECORDS.parquet is what `recserve ab URL --mode paired --records F` writes of two equal arms. Each
replay resamples the trace in long stretches (stationary bootstrap of Politis and Romano 1994), so
that its waves stay, draws the arms anew as the mode does, and runs the comparison of the package.

A/A: nothing differs, so 5 % of the replays may call a difference; the share must lie in the
binomial 99 % band. Power: one arm's latencies are multiplied by 1.03, so that its 99th percentile
is 3 % higher; the number of shots at which 90 % of the replays find it is computed from the errors
of the A/A replays, and then tried.
"""

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from scipy import stats

from recserve.experiments.statistics import (
    STATISTICS,
    Observations,
    autocorrelation_time,
    compare,
    count_blocks,
    difference_time,
    time_blocks,
)
from recserve.load.session import this_machine

STRETCH = 500  # mean length of a resampled stretch, in shots
ALPHA = 0.05
POWER = 0.9
EFFECT = 0.03
MODES = ("blocks", "paired")
PER_BLOCK = 2


@dataclass(frozen=True)
class Cell:
    """Replays of one mode at one size."""

    mode: str
    shots: int
    effect: float
    replays: int
    found: dict[str, float]
    errors: dict[str, float]
    blocks: float


def read_trace(path: Path) -> np.ndarray:
    """[m, 2] latencies of the pairs of a paired run, in order of time."""
    table = pq.read_table(path, columns=["shot", "place", "latency_ms", "error"])
    shot, place = table["shot"].to_numpy(), table["place"].to_numpy()
    pairs = np.full((shot.max() + 1, 2), np.nan)
    pairs[shot, place] = table["latency_ms"].to_numpy()
    return pairs[np.isfinite(pairs).all(axis=1)]


def drawn_trace(size: int, seed: int) -> np.ndarray:
    """[size, 2] log-normal latencies on waves (AR 0.99) that both calls of a pair share."""
    drawn = np.random.default_rng(seed)
    waves = np.empty(size)
    waves[0] = 0.0
    shocks = drawn.normal(0, np.sqrt(1 - 0.99**2), size)
    for i in range(1, size):
        waves[i] = 0.99 * waves[i - 1] + shocks[i]
    own = drawn.normal(0, 0.25, (size, 2))
    return 10 * np.exp(0.25 * waves[:, None] + own)


def stationary(length: int, size: int, drawn: np.random.Generator) -> np.ndarray:
    """[size] row numbers: stretches of geometric length from drawn places, wrapped around."""
    starts = drawn.random(size) < 1 / STRETCH
    starts[0] = True
    heads = np.flatnonzero(starts)
    origin = drawn.integers(0, length, len(heads))
    which = np.cumsum(starts) - 1
    return (origin[which] + np.arange(size) - heads[which]) % length


def observed(trace: np.ndarray, mode: str, shots: int, effect: float, seed: int) -> Observations:
    """One experiment: the latencies of both arms, with time blocks as the package makes them."""
    drawn = np.random.default_rng(seed)
    rows = stationary(len(trace), shots, drawn)
    if mode == "paired":
        flip = drawn.random(shots) < 0.5
        values = trace[rows].reshape(-1)
        treated = np.stack([flip, ~flip], axis=1).reshape(-1)
        order = np.repeat(np.arange(shots), 2)
    else:
        values = trace[rows, 0]
        block = np.repeat([False, True], PER_BLOCK)
        count = -(-shots // len(block))
        treated = drawn.permuted(np.tile(block, (count, 1)), axis=1).reshape(-1)[:shots]
        order = np.arange(shots)
    values = np.where(treated, values * (1 + effect), values)
    tau = difference_time(values, treated, order)
    blocks = time_blocks(order, count_blocks(shots, tau))
    return Observations(values, treated, blocks)


def replay(trace: np.ndarray, mode: str, shots: int, effect: float, seed: int) -> dict:
    """One experiment: p-value and log error per statistic."""
    drawn = observed(trace, mode, shots, effect, seed)
    result = {"p": {}, "error": {}, "blocks": drawn.num_blocks}
    for statistic in STATISTICS:
        effect_ = compare(drawn, statistic)
        result["p"][statistic] = effect_.p_value
        result["error"][statistic] = effect_.log_error
    return result


def run_cell(pool, trace, mode: str, shots: int, effect: float, replays: int) -> Cell:
    """All replays of a cell."""
    jobs = [
        pool.submit(_several, trace, mode, shots, effect, range(first, min(first + 20, replays)))
        for first in range(0, replays, 20)
    ]
    results = [one for job in jobs for one in job.result()]
    return Cell(
        mode=mode,
        shots=shots,
        effect=effect,
        replays=replays,
        found={s: float(np.mean([r["p"][s] < ALPHA for r in results])) for s in STATISTICS},
        errors={s: float(np.mean([r["error"][s] for r in results])) for s in STATISTICS},
        blocks=float(np.mean([r["blocks"] for r in results])),
    )


def _several(trace, mode, shots, effect, seeds) -> list[dict]:
    return [replay(trace, mode, shots, effect, seed) for seed in seeds]


def needed_shots(cell: Cell) -> int:
    """Shots at which an effect of 3 % at p99 is found with power 0.9, from the errors of a cell."""
    reach = stats.norm.ppf(1 - ALPHA / 2) + stats.norm.ppf(POWER)
    wanted = np.log1p(EFFECT) / reach
    # A tenth more, because the errors are themselves estimated and t quantiles are wider.
    return int(np.ceil(1.1 * cell.shots * (cell.errors["p99"] / wanted) ** 2 / 1000) * 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--power-replays", type=int, default=200)
    parser.add_argument("--shots", type=int, default=20_000)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.time()
    trace = read_trace(options.trace) if options.trace else drawn_trace(20_000, 0)
    band = stats.binom.interval(0.99, options.replays, ALPHA)
    low, high = (float(edge) / options.replays for edge in band)
    p50, p99 = np.quantile(trace, [0.5, 0.99])
    waves = autocorrelation_time(np.log(trace[:, 0]))
    print(f"trace of {len(trace)} pairs, p50 {p50:.2f} ms, p99 {p99:.2f} ms, ", end="")
    print(f"correlated over {waves:.0f} requests; band of 5 %: {low:.3f} to {high:.3f}")
    cells, ok = [], True
    with ProcessPoolExecutor(options.workers) as pool:
        for mode in options.modes.split(","):
            cell = run_cell(pool, trace, mode, options.shots, 0.0, options.replays)
            cells.append(cell)
            inside = {s: low <= share <= high for s, share in cell.found.items()}
            ok &= all(inside.values())
            shares = ", ".join(
                f"{s} {share:.3f}{'' if inside[s] else ' OUTSIDE'}"
                for s, share in cell.found.items()
            )
            print(f"A/A {mode}, {cell.shots} shots, {cell.blocks:.0f} blocks: {shares}")
            if not options.power_replays:
                continue
            shots = needed_shots(cell)
            power = run_cell(pool, trace, mode, shots, EFFECT, options.power_replays)
            cells.append(power)
            found = power.found["p99"]
            bound = stats.binomtest(
                round(found * power.replays), power.replays, POWER, alternative="less"
            ).pvalue
            ok &= bound > 0.01
            print(f"+3 % {mode}, {shots} shots: found at p99 in {found:.3f} of {power.replays}")
    print(f"{'all within' if ok else 'NOT all within'} their bands, {time.time() - began:.0f} s")
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "machine": asdict(this_machine()),
                    "trace": str(options.trace.name) if options.trace else "drawn",
                    "pairs": len(trace),
                    "p50_ms": p50,
                    "p99_ms": p99,
                    "correlated_over": waves,
                    "band": [low, high],
                    "cells": [asdict(cell) for cell in cells],
                    "ok": bool(ok),
                },
                indent=2,
            )
        )
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()
