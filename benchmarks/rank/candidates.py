"""Measures ranking: candidates in one tree, one forward pass each, or one dense mask.

    python -m benchmarks.rank.candidates        # quick: 100 and 500 candidates
    python -m benchmarks.rank.candidates --all  # 100, 500, 4,000 candidates, prefixes 200 and 2,000

Two scorers run. `likelihood`: a recommender scores the semantic ids of the candidates, 4 tokens
each, with a softmax over the valid children. `ranker`: one token per candidate under MTGR's mask.

Prints a table per scorer and prefix with median milliseconds by method and number of candidates,
then the engine's stages. The scores of all methods are compared, and the run fails if they differ.
Scoring one by one takes a time proportional to the candidates. If all of them would exceed
`--budget-s`, as many as fit are timed and the rest is extrapolated, marked with "~". `cold` is a
new user; for `warm`, the user's prefix is cached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.baselines.llama import to_llama
from benchmarks.support.baselines.scoring import (
    CHUNK,
    Items,
    dense_mask,
    pointwise,
    pointwise_cached,
    ranker_dense,
    ranker_pointwise,
)
from benchmarks.support.drawn import (
    drawn_catalogue,
    drawn_prefixes,
    drawn_ranker,
    drawn_ranking_prefix,
    drawn_recommender,
)
from benchmarks.support.report import Report, options_of
from benchmarks.support.runs import Runs, measure
from recserve.core.request import (
    LikelihoodQuery,
    Prefix,
    PrefixKeys,
    RankQuery,
    Request,
    Scores,
    Timing,
)
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.inputs import NodeInputs

TOLERANCE = 1e-3
METHODS = ("pointwise", "pointwise, cached", "dense mask", "cold", "warm")


@dataclass(frozen=True)
class Task:
    """One cell of the benchmark.

    Attributes:
        engine: The engine.
        request: Builds the engine's request for a prefix.
        prefixes: Prefixes of the users.
        linear: Baselines that score the first `count` candidates.
        whole: Baseline that scores all candidates in one dense forward pass.
        whole_gflop: Operations of that dense pass.
        mask_gb: Memory of its mask.
    """

    engine: Engine
    request: Callable[[Prefix], Request]
    prefixes: list[Prefix]
    linear: dict[str, Callable[[int], torch.Tensor]]
    whole: Callable[[], torch.Tensor]
    whole_gflop: float
    mask_gb: float


@dataclass
class Measured:
    """Figures of one cell; the scores of each method are [M, tasks]."""

    runs: dict[str, Runs] = field(default_factory=dict)
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    stages: dict[str, Timing] = field(default_factory=dict)


class Likelihood:
    """A recommender with `codes` input over 12,101 random items."""

    name = "likelihood"

    def __init__(self, hidden: int, layers: int) -> None:
        self.catalogue = drawn_catalogue(12_101)
        self.model = drawn_recommender(self.catalogue, hidden, layers, "children", torch.float32)
        self.theirs = to_llama(self.model)
        self.engine = build_engine(EngineModels(self.model), EngineConfig(kv_bytes=3 * 2**30))
        self.trunk = sum(w.numel() for w in self.model.decoder.parameters())
        self.width = layers * hidden

    def task(self, prefix: int, candidates: int, count: int) -> Task:
        model, trie = self.model, self.catalogue.trie
        prefixes = drawn_prefixes(model, prefix // model.config.num_levels, count, 0)
        rows = np.random.default_rng(1).permutation(model.num_bound_items)[:candidates]
        offsets = model.config.level_offsets
        items = Items.of(trie, torch.from_numpy(rows), model.item_tokens, offsets)
        prompt = prefixes[0].inputs.tokens
        nodes = candidates * (model.config.num_levels - 1)
        total = prefix + nodes
        return Task(
            self.engine,
            lambda r: LikelihoodQuery(r, trie, rows),
            prefixes,
            {
                "pointwise": lambda n: pointwise(self.theirs, prompt, items.select(slice(n))),
                "pointwise, cached": lambda n: pointwise_cached(
                    self.theirs, prompt, items.select(slice(n))
                ),
            },
            lambda: dense_mask(model, prompt, items),
            1e-9 * (2 * self.trunk * total + 4 * self.width * total * total),
            5e-9 * total * total,
        )


class Ranking:
    """A ranker over 12,101 random items, with 2 tasks and 24 dense columns."""

    name = "ranker"

    def __init__(self, hidden: int, layers: int) -> None:
        self.model = drawn_ranker(12_101, hidden, layers)
        self.engine = build_engine(
            EngineModels(ranker=self.model), EngineConfig(kv_bytes=3 * 2**30)
        )
        self.trunk = sum(w.numel() for w in self.model.layers.parameters())
        self.width = layers * hidden

    def task(self, prefix: int, candidates: int, count: int) -> Task:
        prefixes = [drawn_ranking_prefix(self.model, prefix, seed) for seed in range(count)]
        chosen, shared = (
            drawn_ranking_prefix(self.model, candidates, 10_000).inputs,
            prefixes[0].shared,
        )
        branches = replace(chosen, groups=torch.full((candidates,), 3))
        first: NodeInputs = prefixes[0].inputs
        total = prefix + candidates
        return Task(
            self.engine,
            lambda r: RankQuery(r, branches),
            prefixes,
            {
                "pointwise": lambda n: ranker_pointwise(
                    self.model, first, shared, branches.select(slice(n))
                )
            },
            lambda: ranker_dense(self.model, first, shared, branches),
            1e-9 * (2 * self.trunk * total + 4 * self.width * total * total),
            # The attention scores of all heads of a layer exist at once, in two copies.
            8e-9 * total * total * self.model.config.num_heads + 5e-9 * total * total,
        )


def run_task(task: Task, candidates: int, options: argparse.Namespace, gflops: float) -> Measured:
    """Times every method."""
    out = Measured()
    budget, clock = options.budget_s, options.clock
    for name, score in task.linear.items():
        # The time of one chunk gives the number of candidates that fit into the budget.
        trial = measure(partial(_first_chunk, score), 1, budget, clock)
        fit = int(budget / 2 / (trial.median_ms / 1e3 / CHUNK)) // CHUNK * CHUNK
        count = min(candidates, max(CHUNK, fit))

        def call(_: int, s: Any = score, n: int = count, name: str = name) -> None:
            out.scores[name] = s(n).float().numpy().reshape(n, -1)

        runs = measure(call, options.repeats, budget, clock)
        if count < candidates:
            scaled = tuple(t * candidates / count for t in runs.times_ms)
            runs = Runs(scaled, f"~ from {count}")
        out.runs[name] = runs
    seconds = task.whole_gflop / gflops
    if seconds > budget or task.mask_gb > options.memory_gb:
        words = f"skipped: > {seconds:,.0f} s by its operations, {task.mask_gb:.1f} GB of mask"
        out.runs["dense mask"] = Runs(note=words)
    else:

        def whole(_: int) -> None:
            out.scores["dense mask"] = task.whole().float().numpy().reshape(candidates, -1)

        out.runs["dense mask"] = measure(whole, options.repeats, budget, clock)
    for name in ("cold", "warm"):
        timings: list[Timing] = []

        def answer(number: int, name: str = name, timings: Any = timings) -> None:
            prefix = task.prefixes[number if name == "cold" else 0]
            result = task.engine.run(task.request(prefix))
            assert isinstance(result, Scores)
            if number:
                timings.append(result.timing)
            if name == "warm":
                out.scores[name] = result.values

        if name == "cold":
            for prefix in task.prefixes:
                task.engine.forget(PrefixKeys(prefix.keys, prefix.shared))
        out.runs[name] = measure(answer, options.repeats, budget, clock)
        if timings:
            out.stages[name] = timings[len(timings) // 2]
    return out


def _first_chunk(score: Callable[[int], torch.Tensor], _: int) -> None:
    score(CHUNK)


def agreement(scores: dict[str, np.ndarray]) -> tuple[str, bool]:
    """Returns each method's largest difference from the engine's scores, and True if all agree."""
    ours = scores["warm"]
    apart = {
        name: float(np.abs(theirs - ours[: len(theirs)]).max())
        for name, theirs in scores.items()
        if name != "warm"
    }
    words = ", ".join(f"{name} {value:.1e}" for name, value in apart.items())
    spread = float(ours.std())
    return f"scores (spread {spread:.2f}) within: {words}", all(
        a < TOLERANCE for a in apart.values()
    )


def print_table(console: Console, title: str, columns: dict[int, Measured]) -> None:
    """Prints methods as rows and numbers of candidates as columns."""
    table = Table(title=title, title_justify="left")
    table.add_column("ms, median")
    for candidates in columns:
        table.add_column(f"{candidates:,} candidates", justify="right")
    for name in METHODS:
        if any(name in c.runs for c in columns.values()):
            empty = Runs(note="-")
            table.add_row(name, *(c.runs.get(name, empty).words() for c in columns.values()))
    console.print(table)
    for candidates, c in columns.items():
        for name, t in c.stages.items():
            console.print(
                f"  {candidates:,} {name}: prefill {t.prefill_ms:.2f} draft {t.draft_ms:.2f} "
                f"verify {t.verify_ms:.2f} total {t.total_ms:.2f} ms, {t.nodes} nodes"
            )


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__, budget_s=8.0, repeats=10)
    parser.add_argument(
        "--scorers", nargs="+", choices=["likelihood", "ranker"], help="default: both"
    )
    parser.add_argument("--candidates", nargs="+", type=int, help="numbers of candidates")
    parser.add_argument("--prefixes", nargs="+", type=int, help="lengths of the prefixes")
    parser.add_argument("--model", default="256x4", help="hidden x layers of both scorers")
    parser.add_argument(
        "--memory-gb", type=float, default=4.0, help="bound on the memory of a method, in GB"
    )
    options = parser.parse_args()
    options.scorers = options.scorers or ["likelihood", "ranker"]
    options.candidates = options.candidates or ([100, 500, 4000] if options.all else [100, 500])
    options.prefixes = options.prefixes or ([200, 2000] if options.all else [200])
    return options


def main() -> int:
    options = arguments()
    report = Report(options)
    console = report.console
    hidden, layers = (int(part) for part in options.model.split("x"))
    gflops = report.matmul(512, hidden, 8 * hidden, torch.float32)
    all_same = True
    scorers: dict[str, type[Likelihood] | type[Ranking]] = {
        "likelihood": Likelihood,
        "ranker": Ranking,
    }
    for name in options.scorers:
        scorer = scorers[name](hidden, layers)
        for prefix in options.prefixes:
            columns: dict[int, Measured] = {}
            said = []
            for candidates in options.candidates:
                task = scorer.task(prefix, candidates, options.repeats + 2)
                done = run_task(task, candidates, options, gflops)
                words, same = agreement(done.scores)
                said.append(f"  {candidates:,} {words}")
                all_same &= same
                columns[candidates] = done
                report.add(
                    [
                        {
                            "scorer": name,
                            "model": options.model,
                            "prefix": prefix,
                            "candidates": candidates,
                            "dense_gflop": task.whole_gflop,
                            "runs": {
                                n: asdict(r) | {"median_ms": r.median_ms}
                                for n, r in done.runs.items()
                            },
                            "stages": {n: asdict(t) for n, t in done.stages.items()},
                            "agreement": words,
                        }
                    ]
                )
            print_table(console, f"{name} · {options.model} · prefix {prefix:,}", columns)
            for line in said:
                console.print(line)
    if not all_same:
        console.print("[red]scores differ between methods[/red]")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
