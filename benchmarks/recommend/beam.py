"""Measures beam search of this engine against implementations without it, on the same weights.

    python -m benchmarks.recommend.beam                      # quick: 12,101 items, 256 x 4, batch 1
    python -m benchmarks.recommend.beam --all --json F.json  # every cell, long
    python -m benchmarks.recommend.beam --items 1000000 --models 1024x12 --beams 50 --batches 8

Every method answers the same random histories over the same trie with the same score, a softmax
over the valid children. Methods that share the weights must return the same slates: the run fails
if one differs in fp32. The T5 has its own weights and is only timed.

Prints a table per model and batch with milliseconds per batch by method and beam width, then the
engine's stages. A method is skipped, with a note, if its operations would exceed `--budget-s` or
its cache copies `--memory-gb`. `cold` is a new user; for `warm`, the user's prefix is cached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.recommend.beam_methods import (
    HISTORY_TOKENS,
    METHODS,
    Cell,
    Model,
    Work,
    answers,
    forecast,
)
from benchmarks.support.drawn import NODES, Catalogue, drawn_catalogue, published_catalogue
from benchmarks.support.report import Report, options_of
from benchmarks.support.runs import Runs, matmul_gflops, measure
from recserve.core.request import Timing

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SAME_WEIGHTS = ("generate", "kv-copy", "bare-tree", "warm")
QUICK: dict[str, list[Any]] = {
    "items": ["12101"],
    "models": ["256x4"],
    "dtypes": ["float32"],
    "batches": [1],
    "beams": [10, 50],
}
ALL: dict[str, list[Any]] = {
    "items": ["12101", "1000000", "published"],
    "models": ["256x4", "1024x12"],
    "dtypes": ["float32", "bfloat16"],
    "batches": [1, 8],
    "beams": [10, 50, 200],
}


def agreement(found: dict[str, Any], cell: Cell) -> tuple[str, bool]:
    """Compares the engine's slates with those of the methods that share its weights."""
    ours = found["warm"]
    rows = np.stack([slate.rows for slate in ours])
    scores = np.stack([slate.scores for slate in ours])
    words, same = [], True
    for name in (n for n in SAME_WEIGHTS[:-1] if n in found):
        theirs = found[name]
        equal = float((theirs.rows.numpy() == rows).mean())
        apart = float(np.abs(theirs.scores.numpy() - scores).max())
        words.append(f"{name}: ids {equal:.1%} equal, scores within {apart:.1e}")
        # Two items within a rounding error may swap places; their scores then agree.
        same &= apart < 1e-3 and equal > 0.9
    return "; ".join(words), same or cell.dtype != "float32"


def run_cell(
    model: Model, cell: Cell, options: argparse.Namespace, gflops: float
) -> tuple[dict[str, Runs], dict[str, Timing], str, bool]:
    """Times all methods of a cell; returns times, the engine's stages, and agreement as text and
    bool.
    """
    runs: dict[str, Runs] = {}
    stages: dict[str, Timing] = {}
    found: dict[str, Any] = {}
    with_engine = [name for name in METHODS if name in options.methods or name == "warm"]
    for name, answer in answers(model, cell, options.repeats):
        if name not in with_engine:
            continue
        seconds, gigabytes = forecast(name, model, cell, gflops)
        if seconds > options.budget_s:
            runs[name] = Runs(note=f"skipped: > {seconds:,.0f} s by its operations")
            continue
        if gigabytes > options.memory_gb:
            runs[name] = Runs(note=f"skipped: {gigabytes:,.0f} GB of copies")
            continue
        timings: list[Timing] = []

        def call(number: int, name: str = name, answer: Any = answer, out: Any = timings) -> None:
            found[name] = answer(number)
            if name in ("cold", "warm") and number:
                out.append(found[name][0].timing)

        runs[name] = measure(call, options.repeats, options.budget_s, options.clock)
        if name in ("cold", "warm") and timings:
            stages[name] = median_timing(timings)
    return runs, stages, *agreement(found, cell)


def median_timing(timings: list[Timing]) -> Timing:
    """Returns the median of each field."""
    names = list(asdict(timings[0]))
    middle: dict[str, Any] = {
        name: float(np.median([getattr(t, name) for t in timings])) for name in names
    }
    return replace(timings[0], **middle)


def catalogue(name: str) -> Catalogue:
    if name == "published":
        return published_catalogue(DATA)
    return drawn_catalogue(int(name))


def print_cells(console: Console, title: str, rows: dict[int, dict[str, Runs]]) -> None:
    """Prints methods as rows and beam widths as columns, in milliseconds per batch."""
    table = Table(title=title, title_justify="left")
    table.add_column("ms per batch, median")
    for beams in rows:
        table.add_column(f"beam {beams}", justify="right")
    for name in METHODS:
        if any(name in cells for cells in rows.values()):
            empty = Runs(note="-")
            table.add_row(name, *(cells.get(name, empty).words() for cells in rows.values()))
    console.print(table)


def print_stages(
    console: Console, stages: dict[str, Timing], work: Work, beams: int, gflops: float
) -> None:
    """Prints the engine's time per stage, and the prefill rate relative to a matrix product."""
    for name, t in stages.items():
        console.print(
            f"  beam {beams} {name}: queue {t.queue_ms:.2f} prefill {t.prefill_ms:.2f} draft "
            f"{t.draft_ms:.2f} verify {t.verify_ms:.2f} total {t.total_ms:.2f} ms; "
            f"{t.forwards:.0f} tree forwards, {t.nodes:.0f} nodes per user"
        )
    if "cold" in stages and stages["cold"].prefill_ms:
        rate = work.prefill_gflop / stages["cold"].prefill_ms * 1e3
        console.print(
            f"  prefill: {work.prefill_gflop:.2f} GFLOP at {rate:.0f} GFLOP/s "
            f"(plain matmul here: {gflops:.0f}); a tree forward reads {work.weight_mbytes:.1f} MB "
            f"of weights, the prefix is {work.kv_mbytes:.2f} MB"
        )


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__, budget_s=8.0, repeats=20)
    parser.add_argument(
        "--items", nargs="+", choices=[*map(str, NODES), "published"], help="catalogues"
    )
    parser.add_argument("--models", nargs="+", help="hidden size x layers, such as 256x4")
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], help="dtypes of the weights"
    )
    parser.add_argument("--batches", nargs="+", type=int, help="requests per batch")
    parser.add_argument("--beams", nargs="+", type=int, help="beam widths")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods to measure"
    )
    parser.add_argument(
        "--memory-gb", type=float, default=6.0, help="bound on the memory of a method, in GB"
    )
    parser.add_argument("--invariant", action="store_true", help="the engine's invariant mode")
    options = parser.parse_args()
    for name, values in (ALL if options.all else QUICK).items():
        if getattr(options, name) is None:
            setattr(options, name, values)
    if "published" in options.items and not DATA.is_dir():
        print("no published ids beside the repository; they are left out", file=sys.stderr)
        options.items = [name for name in options.items if name != "published"]
    return options


def models(options: argparse.Namespace) -> Iterator[tuple[Model, Cell]]:
    """Yields each selected model, and its cell without batch and beam width."""
    for items in options.items:
        drawn = catalogue(items)
        for shape in options.models:
            for dtype in options.dtypes:
                yield Model(drawn, shape, dtype, options.invariant), Cell(items, shape, dtype, 0, 0)


def main() -> int:
    options = arguments()
    report = Report(options)
    console = report.console
    all_same = True
    for model, like in models(options):
        hidden = model.ours.config.decoder.hidden_size
        tokens = HISTORY_TOKENS + 1
        gflops = matmul_gflops(tokens, hidden, 8 * hidden, model.dtype, options.clock)
        for batch in options.batches:
            work = model.work(batch)
            rows: dict[int, dict[str, Runs]] = {}
            details = []
            for beams in options.beams:
                cell = replace(like, batch=batch, beams=beams)
                runs, stages, words, same = run_cell(model, cell, options, gflops)
                rows[beams] = runs
                details.append((beams, stages, words))
                all_same &= same
                found = asdict(cell) | {"matmul_gflops": gflops, "work": asdict(work)}
                found["runs"] = {n: asdict(r) | {"median_ms": r.median_ms} for n, r in runs.items()}
                found["stages"] = {name: asdict(t) for name, t in stages.items()}
                report.add([found | {"agreement": words}])
            print_cells(console, replace(like, batch=batch).title(), rows)
            for beams, stages, words in details:
                print_stages(console, stages, work, beams, gflops)
                console.print(f"  beam {beams} {words}")
    if not all_same:
        console.print("[red]slates differ between methods that share their weights[/red]")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
