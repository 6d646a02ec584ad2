"""Measures `speculative` against full beam search, on the same users in turns.

    python -m benchmarks.recommend.speculative --bundle B --dtype bfloat16         # every cell
    python -m benchmarks.recommend.speculative --bundle B --clock cpu              # on busy cores
    python -m benchmarks.recommend.speculative --bundle B --least-events 150       # long histories

`beam` is full beam search. `drafted` always uses the draft with the least expected work. `auto` is
what the server does. The three methods take turns over the same users. A ratio is the median over
the turns, so that other load on the machine affects all methods alike. All slates are compared: the
run fails if one differs in float32.

Prints one row per cell with milliseconds, ratios and work. `again` is a user with the same earlier
request. `first` is a user whose prefix is cached, as after events with `warm`. `cold` is a new
user. benchmarks/recommend/joined_bundle.py makes a bundle with long histories.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.recommend.workloads import Subject, Work, trained_subject
from benchmarks.support.report import Report, options_of
from benchmarks.support.runs import CLOCKS, Runs
from recserve.core.request import (
    Prefix,
    PrefixKeys,
    PrewarmQuery,
    Slate,
    SlateQuery,
)
from recserve.models.item_heads import DraftPlan
from recserve.search.strategies.speculative import PlanPolicy, SpeculativeStrategy, cheapest_draft
from recserve.service.auto_strategy import AUTO, BEAM, SPECULATIVE

DRAFTED = "drafted"
METHODS = (BEAM, DRAFTED, AUTO)
VISITS = ("again", "first", "cold")
WARM_UP = 4  # groups of requests before the first turn


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    k: int
    beam: int
    batch: int
    visit: str


@dataclass
class Measured:
    """Milliseconds of each turn and work of each slate, by method.

    `differing` counts the slates that differ from those of beam search.
    """

    times: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in METHODS})
    work: dict[str, Work] = field(default_factory=lambda: {name: Work() for name in METHODS})
    differing: int = 0

    def ratio(self, name: str) -> float:
        """Returns beam search's time divided by the method's."""
        return float(np.median(np.array(self.times[BEAM]) / np.array(self.times[name])))


class AlwaysDrafting(PlanPolicy):
    """Drafts even if drafting does not pay."""

    def plan(self, request: SlateQuery) -> DraftPlan:
        """Returns the draft with the least expected work."""
        assert self.calibration is not None
        return cheapest_draft(self.calibration.scaled(request.width, request.k))


def offer_drafts(subject: Subject) -> None:
    """Adds a strategy that always drafts to the engine.

    Raises:
        ValueError: If the bundle has no draft head.
    """
    strategy = subject.engine._strategies.get(SPECULATIVE)
    if not isinstance(strategy, SpeculativeStrategy) or strategy.head.calibration is None:
        raise ValueError("the bundle has no calibrated draft head; run `recserve train drafter`")
    drafted = SpeculativeStrategy(subject.model, strategy.head)
    drafted.policy = AlwaysDrafting(drafted.name, strategy.head)
    subject.engine.add_strategy(DRAFTED, drafted)


def measured(subject: Subject, cell: Cell, options: argparse.Namespace) -> Measured:
    """Runs all methods in turns until the repeats or the cell's budget are spent."""
    found, clock = Measured(), CLOCKS[options.clock]
    groups = len(subject.prefixes) // cell.batch

    def ask(name: str, prefixes: list[Prefix], work: Work | None) -> list[Slate]:
        return subject.ask(prefixes, cell.k, cell.beam, name, work)

    def before(prefixes: list[Prefix]) -> None:
        if cell.visit != "again":
            for prefix in prefixes:
                subject.engine.forget(PrefixKeys(prefix.keys))
        if cell.visit == "first":
            subject.engine.run_many([PrewarmQuery(prefix, "recommender") for prefix in prefixes])

    def users(number: int) -> list[Prefix]:
        first = number % groups * cell.batch
        return subject.prefixes[first : first + cell.batch]

    for number in range(max(2 * groups if cell.visit == "again" else 0, WARM_UP)):
        for name in METHODS[1:]:
            before(users(number))
            ask(name, users(number), None)
    began = time.monotonic()
    for number in range(options.repeats):
        slates: dict[str, list[Slate]] = {}
        for name in np.roll(METHODS, number).tolist():
            before(users(number))
            started = clock()
            slates[name] = ask(name, users(number), found.work[name])
            found.times[name].append((clock() - started) * 1e3)
        for name in METHODS[1:]:
            found.differing += sum(
                a.rows.tolist() != b.rows.tolist()
                for a, b in zip(slates[name], slates[BEAM], strict=True)
            )
        if time.monotonic() - began > options.budget_s:
            break
    return found


def row(cell: Cell, found: Measured) -> list[str]:
    """Returns a cell as a row of the table."""
    words = [str(cell.k), str(cell.beam), str(cell.batch), cell.visit]
    words.append(f"{Runs(tuple(found.times[BEAM])).median_ms:.1f}")
    for name in METHODS[1:]:
        words += [f"{np.median(found.times[name]):.1f}", f"{found.ratio(name):.2f}"]
    return [*words, *(found.work[name].words() for name in METHODS)]


def as_json(cell: Cell, found: Measured) -> dict[str, Any]:
    """Returns a cell for the JSON file."""
    return vars(cell) | {
        "turns": len(found.times[BEAM]),
        "differing": found.differing,
        "median_ms": {name: float(np.median(times)) for name, times in found.times.items()},
        "ratio": {name: found.ratio(name) for name in METHODS[1:]},
        "work": {name: work.words() for name, work in found.work.items()},
    }


def main() -> int:
    parser = options_of(__doc__, budget_s=6.0, repeats=100, every_cell=False)
    parser.add_argument("--bundle", type=Path, required=True, help="bundle to measure")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the weights"
    )
    parser.add_argument("--k", nargs="+", type=int, default=[10, 50], help="items per slate")
    parser.add_argument("--beams", nargs="+", type=int, default=[10, 50, 256], help="beam widths")
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[1, 8, 32], help="requests per batch"
    )
    parser.add_argument(
        "--visits", nargs="+", choices=VISITS, default=list(VISITS), help="states of the cache"
    )
    parser.add_argument("--users", type=int, default=32, help="number of users")
    parser.add_argument(
        "--least-events", type=int, default=1, help="minimum number of events in a user's history"
    )
    options = parser.parse_args()
    report = Report(options)
    dtype: torch.dtype = getattr(torch, options.dtype)
    subject = trained_subject(options.bundle, options.users, dtype, options.least_events)
    offer_drafts(subject)
    lengths = [len(prefix.keys) for prefix in subject.prefixes]
    report.console.print(f"{len(lengths)} users, {np.median(lengths):.0f} tokens of history")
    heads = ["k", "beam", "batch", "visit", "beam ms", "drafted ms", "beam / it"]
    heads += ["auto ms", "beam / it", *(f"{name}: work" for name in METHODS)]
    rows, differing = [], 0
    for visit, batch, beam, k in product(options.visits, options.batches, options.beams, options.k):
        if k > beam or batch > len(subject.prefixes):
            continue
        cell = Cell(k, beam, batch, visit)
        found = measured(subject, cell, options)
        differing += found.differing
        rows.append(row(cell, found))
        report.add([as_json(cell, found)])
        report.console.print(" | ".join(rows[-1]))
    table = Table(*heads, title=f"{options.dtype}, {options.clock} clock", title_justify="left")
    for words in rows:
        table.add_row(*words)
    report.console.print(table)
    if differing:
        report.console.print(f"{differing} slates differ from beam search's")
    return 1 if differing and options.dtype == "float32" else 0


if __name__ == "__main__":
    sys.exit(main())
