"""Measures warm slates while another process takes one of the cores, by OpenMP spin count.

    python -m benchmarks.server.shared_cores [--spins as-is 1000 10000] [--threads 2] [--json F]

Threads of a forward pass wait for each other by spinning (GOMP_SPINCOUNT iterations). A thread that
waits for a thread without a core spins in vain. Every setting runs in its own process, since torch
reads the count when it is loaded. The settings take turns. Prints the median over the turns and the
p99 for each setting, with and without the other process. That process computes without a pause at
the same priority (nice 0).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AS_IS = "as-is"  # the value in the environment, or the default of torch's OpenMP
BUSY = "while True: sum(range(10000))"


def slates(threads: int, seconds: float) -> list[float]:
    """Returns the milliseconds of warm slates of beam width 50 on a 256 x 4 model in fp32."""
    import torch

    from benchmarks.support.drawn import drawn_catalogue, drawn_prefixes, drawn_recommender
    from recserve.core.request import SlateQuery
    from recserve.engine.build import EngineModels, build_engine
    from recserve.engine.engine_config import EngineConfig

    torch.set_num_threads(threads)
    catalogue = drawn_catalogue(12_101)
    model = drawn_recommender(catalogue, 256, 4, "children", torch.float32)
    model.pack()
    engine = build_engine(EngineModels(model), EngineConfig(kv_bytes=2**27))
    prefixes = drawn_prefixes(model, 50, 8, 0)
    asked = [
        SlateQuery(prefix=prefix, trie=catalogue.trie, k=50, beam_width=50) for prefix in prefixes
    ]
    engine.run_many(asked)
    taken: list[float] = []
    limit = time.monotonic() + seconds
    while time.monotonic() < limit or len(taken) < 20:
        began = time.perf_counter()
        engine.run(asked[len(taken) % len(asked)])
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


@contextmanager
def neighbour(there: bool) -> Iterator[None]:
    """Runs one busy process inside the context, if `there` is True."""
    process = subprocess.Popen([sys.executable, "-c", BUSY]) if there else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def measured(spin: str, threads: int, seconds: float, busy: bool) -> dict[str, float]:
    """Measures one setting in its own process."""
    environment = dict(os.environ)
    if spin != AS_IS:
        environment["GOMP_SPINCOUNT"] = spin
    child = [sys.executable, "-m", "benchmarks.server.shared_cores", "--child"]
    command = [*child, str(threads), str(seconds)]
    with neighbour(busy):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    taken = json.loads(done.stdout.splitlines()[-1])
    taken.sort()
    return {"median": statistics.median(taken), "p99": taken[int(0.99 * (len(taken) - 1))]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--spins",
        nargs="+",
        default=[AS_IS, "1000", "10000", "100000"],
        help="values of GOMP_SPINCOUNT; as-is keeps the environment",
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="seconds of each setting in each turn"
    )
    parser.add_argument("--turns", type=int, default=3, help="turns over all settings")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        threads, seconds = chosen.child
        print(json.dumps(slates(int(threads), float(seconds))))
        return 0
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(chosen.turns):
        for spin in chosen.spins:
            for busy in (False, True):
                row = measured(spin, chosen.threads, chosen.seconds, busy)
                found.setdefault(f"{spin} {'busy' if busy else 'alone'}", []).append(row)
    rows = []
    for name, runs in found.items():
        median, p99 = (statistics.median(run[key] for run in runs) for key in ("median", "p99"))
        rows.append({"setting": name, "median_ms": median, "p99_ms": p99})
        print(f"{name:<20} {median:8.1f} ms, p99 {p99:8.1f}", flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
