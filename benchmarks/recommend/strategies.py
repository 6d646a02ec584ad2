"""Measures every strategy against `beam` and transformers, on the same weights and histories.

    python -m benchmarks.recommend.strategies --json A.json           # beams 50, 256
    python -m benchmarks.recommend.strategies --threads 1 --clock cpu # on a busy machine
    python -m benchmarks.recommend.strategies --bundle B              # a bundle's own heads

Random heads are enough to time `nezha`, `rpg` and `dense`. Quality, and the rounds that
`speculative` and `specgr` save, need trained heads (`recserve evaluate --strategy all`).

Prints a table per beam width and batch with milliseconds per batch for three kinds of users. `warm`
repeats a user, `event` adds one event to the history, and `cold` is a new user. `generate` is
transformers' beam search over the trie, which has no cache between calls. A cell stops at its time
budget; what is skipped has its reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.recommend.workloads import Subject, drawn_subject, grown, trained_subject
from benchmarks.support.baselines.beams import BeamSearch
from benchmarks.support.baselines.generate import Generate
from benchmarks.support.report import Report, options_of
from benchmarks.support.runs import Runs, measure
from recserve.core.request import Prefix, PrefixKeys

VISITS = ("warm", "event", "cold")
UNTRAINED = ("speculative", "specgr")


def visits(
    subject: Subject, k: int, width: int, strategy: str, batch: int, seed: int
) -> dict[str, Callable[[int], None]]:
    """Returns each kind of visit as a function of the run's number.

    `seed` selects the new events, which must differ from those that another strategy left in the
    cache.
    """
    count = len(subject.prefixes) // batch

    def group(prefixes: list[Prefix], number: int) -> list[Prefix]:
        first = number % count * batch
        return prefixes[first : first + batch]

    def warm(number: int) -> None:
        subject.ask(group(subject.prefixes, number), k, width, strategy)

    def event(number: int) -> None:
        prefixes = group(subject.prefixes, number)
        item = seed * 1000 + number
        subject.ask([grown(subject.model, prefix, item) for prefix in prefixes], k, width, strategy)

    def cold(number: int) -> None:
        for prefix in group(subject.prefixes, number):
            subject.engine.forget(PrefixKeys(prefix.keys))
        warm(number)

    for number in range(count):
        warm(number)
    return {"warm": warm, "event": event, "cold": cold}


def transformers_cold(subject: Subject, width: int, batch: int) -> Callable[[int], None]:
    """Returns `generate` on the same weights in a Llama, with a softmax over the valid children."""
    config = subject.model.config
    search = BeamSearch(subject.trie, config.level_offsets, width, normalise=True)
    prompts = torch.stack([prefix.inputs.tokens for prefix in subject.prefixes])
    generate = Generate(subject.llama, search, prompts.shape[1])
    return lambda number: generate(prompts[torch.arange(batch) + number % 4]) and None


def generate_runs(
    subject: Subject, width: int, batch: int, options: argparse.Namespace, known: dict[int, float]
) -> Runs:
    """Times `generate` on cold users.

    `known` holds milliseconds per call of smaller cells, by batch times width.
    """
    if subject.llama is None:
        return Runs((), "reads items, which no Llama does")
    below = max((size for size in known if size <= batch * width), default=0)
    expected_s = known[below] * batch * width / below / 1e3 if below else 0.0
    if expected_s > options.longest_call_s:
        return Runs((), f"skipped: about {expected_s:.0f} s a call")
    call = transformers_cold(subject, width, batch)
    runs = measure(call, 5, options.budget_s, options.clock)
    known[batch * width] = runs.median_ms
    return runs


def measured_cell(
    subject: Subject, width: int, batch: int, options: argparse.Namespace, known: dict[int, float]
) -> dict[str, dict[str, Runs]]:
    """Returns the runs by strategy and kind of visit."""
    runs: dict[str, dict[str, Runs]] = {}
    for seed, name in enumerate(options.strategies or subject.engine.selectable):
        if name in UNTRAINED and not options.bundle:
            runs[name] = {visit: Runs((), "needs trained heads") for visit in VISITS}
            continue
        k = min(width, options.k)
        calls = visits(subject, k, width, name, batch, 1 + seed + 100 * width + 10_000 * batch)
        runs[name] = {
            visit: measure(call, options.repeats, options.budget_s, options.clock)
            for visit, call in calls.items()
        }
    if options.generate:
        never = Runs((), "has no cache")
        cold = generate_runs(subject, width, batch, options, known)
        runs["generate"] = {"warm": never, "event": never, "cold": cold}
    return runs


def show(console: Console, title: str, runs: dict[str, dict[str, Runs]]) -> None:
    """Prints strategies as rows: median, tail, and the ratio to beam search's time."""
    table = Table(title=title, title_justify="left")
    table.add_column("ms per batch, median")
    for visit in VISITS:
        table.add_column(visit, justify="right")
        table.add_column("beam / it", justify="right")
    for name, cells in runs.items():
        row = [name]
        for visit in VISITS:
            ratio = runs["beam"][visit].median_ms / cells[visit].median_ms
            row += [cells[visit].words(), f"{ratio:.2f}" if cells[visit].times_ms else ""]
        table.add_row(*row)
    console.print(table)


def cells_of(
    runs: dict[str, dict[str, Runs]], width: int, batch: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns the cells in the form that report files hold."""
    shape = "bundle" if options.bundle else options.model
    return [
        {
            "model": shape,
            "dtype": options.dtype,
            "batch": batch,
            "beam": width,
            "visit": visit,
            "runs": {
                name: {
                    "median_ms": cells[visit].median_ms,
                    "p99_ms": cells[visit].p99_ms,
                    "slowest_ms": max(cells[visit].times_ms, default=float("nan")),
                    "runs": len(cells[visit].times_ms),
                    "note": cells[visit].note,
                }
                for name, cells in runs.items()
            },
            "stages": {},
        }
        for visit in VISITS
    ]


def main() -> None:
    parser = options_of(__doc__, budget_s=4.0, repeats=100, every_cell=False)
    parser.add_argument("--bundle", type=Path, help="a trained bundle; default: drawn weights")
    parser.add_argument("--model", default="256x4", help="hidden size x layers of drawn weights")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the weights"
    )
    parser.add_argument("--beams", nargs="+", type=int, default=[50, 256], help="beam widths")
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[1, 8, 32], help="requests per batch"
    )
    parser.add_argument("--k", type=int, default=50, help="items per slate, at most the beam width")
    parser.add_argument("--strategies", nargs="+", help="default: all that the heads allow")
    parser.add_argument(
        "--no-generate", dest="generate", action="store_false", help="leave out transformers"
    )
    parser.add_argument(
        "--longest-call-s",
        type=float,
        default=30.0,
        help="bound on the time of one call of `generate`",
    )
    parser.add_argument("--users", type=int, default=128, help="number of users")
    parser.add_argument(
        "--least-events", type=int, default=1, help="minimum number of events of a bundle's users"
    )
    options = parser.parse_args()
    report = Report(options)
    dtype: torch.dtype = getattr(torch, options.dtype)
    if options.bundle:
        subject = trained_subject(options.bundle, options.users, dtype, options.least_events)
    else:
        subject = drawn_subject(options.model, options.users, dtype)
    report.matmul(512, 256, 1024, dtype)
    known: dict[int, float] = {}
    for batch in options.batches:
        for width in options.beams:
            runs = measured_cell(subject, width, batch, options, known)
            title = f"{options.dtype}, beam {width}, k {min(width, options.k)}, batch {batch}"
            show(report.console, title, runs)
            report.add(cells_of(runs, width, batch, options))


if __name__ == "__main__":
    main()
