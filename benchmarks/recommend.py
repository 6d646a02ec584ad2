"""Recommend: this engine beside what one would write without it, same weights, one process.

    python benchmarks/recommend.py                      # quick: 12,101 items, 256 x 4, batch 1
    python benchmarks/recommend.py --all --json F.json  # every cell, long
    python benchmarks/recommend.py --items 1000000 --models 1024x12 --beams 50 --batches 8

Every method answers the same drawn histories over the same trie with the same score (softmax over
the valid children), and the slates of all methods that share the weights are compared: the run
fails where one differs in fp32. The T5 has weights of its own and is only timed. A method that by
its operations would pass --budget-s, or whose copies of the cache would pass --memory-gb, is
skipped, and the table says so. "cold": a user never seen; "warm": the user's root is cached.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines.beams import BeamSearch, Slates
from baselines.generate import Generate, tiger_t5
from baselines.llama import to_llama
from baselines.loops import bare_tree, kv_copy
from drawn import (
    NODES,
    Catalogue,
    drawn_catalogue,
    drawn_recommender,
    drawn_roots,
    published_catalogue,
)
from measuring import Runs, matmul_gflops, measure
from report import Report, options_of
from rich.console import Console
from rich.table import Table

from recserve.core.request import RecommendRequest, Request, Root, Slate, Timing
from recserve.engine.engine import Engine, EngineConfig

HISTORY_TOKENS = 200
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
METHODS = ("generate", "generate-function", "t5", "kv-copy", "bare-tree", "cold", "warm")
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


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    items: str
    model: str
    dtype: str
    batch: int
    beams: int

    def title(self) -> str:
        return f"{self.items} · {self.model} · {self.dtype} · batch {self.batch}"


@dataclass(frozen=True)
class Work:
    """Operations and bytes of a cell, counted from its shapes.

    trunk: weights that every token passes. prefill_gflop: roots of the batch, once.
    weight_mbytes: read once per forward. kv_mbytes: one user's root.
    """

    trunk: int
    prefill_gflop: float
    weight_mbytes: float
    kv_mbytes: float

    def node_gflop(self, nodes: int) -> float:
        """Operations of `nodes` tree nodes, attention over the root included."""
        return nodes * self.prefill_gflop / (HISTORY_TOKENS + 1)


class Model:
    """One set of weights on one catalogue, and everything that answers with it."""

    def __init__(self, catalogue: Catalogue, shape: str, dtype: str, invariant: bool) -> None:
        hidden, layers = (int(part) for part in shape.split("x"))
        self.catalogue = catalogue
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.ours = drawn_recommender(catalogue, hidden, layers, "children", self.dtype)
        self.theirs = to_llama(self.ours)
        self.bare = copy.deepcopy(self.ours)
        self.ours.pack()  # as the server does when it loads a bundle
        self.t5 = tiger_t5(self.ours.config.num_code_tokens).to(self.dtype)
        slot = 2 * layers * hidden * self.dtype.itemsize
        sizes = EngineConfig(kv_bytes=slot * 16_384, invariant=invariant)
        self.engine = Engine(self.ours, config=sizes)

    def roots(self, count: int, seed: int) -> list[Root]:
        """Histories of 200 tokens, as many items as fit."""
        items = HISTORY_TOKENS // self.ours.config.num_levels
        return drawn_roots(self.ours, items, count, seed)

    def work(self, batch: int) -> Work:
        c = self.ours.config.decoder
        trunk = sum(w.numel() for w in self.bare.decoder.parameters())
        tokens = batch * (HISTORY_TOKENS + 1)
        attention = 4 * c.num_layers * c.num_heads * c.head_dim * HISTORY_TOKENS / 2
        size = self.dtype.itemsize
        kv = 2 * c.num_layers * c.num_kv_heads * c.head_dim * (HISTORY_TOKENS + 1) * size
        return Work(trunk, 1e-9 * tokens * (2 * trunk + attention), 1e-6 * trunk * size, 1e-6 * kv)


def answers(
    model: Model, cell: Cell, repeats: int
) -> Iterator[tuple[str, Callable[[int], list[Slate] | Slates]]]:
    """Each method as a function of the run's number."""
    trie, width = model.catalogue.trie, cell.beams
    search = BeamSearch(trie, model.ours.config.level_offsets, width, normalise=True)
    same = model.roots(cell.batch, 0)
    prompts = torch.stack([root.inputs.tokens for root in same])
    length = prompts.shape[1]

    def engine(roots: list[Root]) -> list[Slate]:
        requests: list[Request] = [RecommendRequest(root, trie, width, width) for root in roots]
        return model.engine.run_many(requests)  # type: ignore[return-value]

    def forgetting(roots: list[Root]) -> list[Slate]:
        for root in roots:
            model.engine.forget(root.keys)
        return engine(roots)

    generate = Generate(model.theirs, search, length)
    yield "generate", lambda _: generate(prompts)
    if cell.items != "1000000":
        function = Generate(model.theirs, search, length, "function")
        yield "generate-function", lambda _: function(prompts)
    t5 = Generate(model.t5, search, length)
    yield "t5", lambda _: t5(prompts)
    yield "kv-copy", lambda _: kv_copy(model.theirs, prompts, search)
    yield "bare-tree", lambda _: bare_tree(model.bare, prompts, search)
    fresh = [model.roots(cell.batch, seed) for seed in range(1, repeats + 2)]
    yield "cold", lambda i: forgetting(fresh[i])
    yield "warm", lambda _: engine(same)


def forecast(name: str, model: Model, cell: Cell, gflops: float) -> tuple[float, float]:
    """Seconds by operations, and GB of caches and activations, of the methods that repeat users."""
    work = model.work(cell.batch)
    c = model.ours.config.decoder
    copies = cell.batch * cell.beams
    kv_gb = 1e-3 * work.kv_mbytes * copies
    activations = 1e-9 * copies * HISTORY_TOKENS * model.dtype.itemsize * 4 * c.intermediate_size
    if name.startswith("generate"):
        return work.prefill_gflop * cell.beams / gflops, 2 * kv_gb + activations
    if name == "kv-copy":
        return (work.prefill_gflop + 3 * work.node_gflop(copies)) / gflops, 2 * kv_gb
    return 0.0, 0.0


def agreement(found: dict[str, Any], cell: Cell) -> tuple[str, bool]:
    """The engine's slates against those of the methods that share its weights."""
    ours = found["warm"]
    rows = np.stack([slate.rows for slate in ours])
    scores = np.stack([slate.scores for slate in ours])
    words, same = [], True
    for name in (n for n in SAME_WEIGHTS[:-1] if n in found):
        theirs = found[name]
        equal = float((theirs.rows.numpy() == rows).mean())
        apart = float(np.abs(theirs.scores.numpy() - scores).max())
        words.append(f"{name}: ids {equal:.1%} equal, scores within {apart:.1e}")
        # Two items within rounding of each other may change places; their scores then agree.
        same &= apart < 1e-3 and equal > 0.9
    return "; ".join(words), same or cell.dtype != "float32"


def run_cell(
    model: Model, cell: Cell, options: argparse.Namespace, gflops: float
) -> tuple[dict[str, Runs], dict[str, Timing], str, bool]:
    """Time all methods of a cell; the engine's stages; agreement in words and as a verdict."""
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
    """Each field's median."""
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
    """Methods down, beam widths across, milliseconds per batch."""
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
    """Where the engine's time goes, and how near the prefill is to a plain matrix product."""
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
            f"of weights, the root is {work.kv_mbytes:.2f} MB"
        )


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__, budget_s=8.0, repeats=20)
    parser.add_argument("--items", nargs="+", choices=[*map(str, NODES), "published"])
    parser.add_argument("--models", nargs="+", help="hidden x layers, such as 256x4")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--beams", nargs="+", type=int)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--memory-gb", type=float, default=6.0)
    parser.add_argument("--invariant", action="store_true", help="the engine's invariant mode")
    options = parser.parse_args()
    for name, values in (ALL if options.all else QUICK).items():
        if getattr(options, name) is None:
            setattr(options, name, values)
    if "published" in options.items and not DATA.is_dir():
        print("no published ids beside the repository; they are left out", file=sys.stderr)
        options.items = [name for name in options.items if name != "published"]
    return options


def main() -> int:
    options = arguments()
    report = Report(options)
    console = report.console
    all_same = True
    for items in options.items:
        trie = catalogue(items)
        for shape in options.models:
            for dtype in options.dtypes:
                model = Model(trie, shape, dtype, options.invariant)
                hidden = model.ours.config.decoder.hidden_size
                gflops = matmul_gflops(
                    HISTORY_TOKENS + 1, hidden, 8 * hidden, model.dtype, options.clock
                )
                for batch in options.batches:
                    rows: dict[int, dict[str, Runs]] = {}
                    details = []
                    for beams in options.beams:
                        cell = Cell(items, shape, dtype, batch, beams)
                        runs, stages, words, same = run_cell(model, cell, options, gflops)
                        rows[beams] = runs
                        details.append((beams, stages, words))
                        all_same &= same
                        found = asdict(cell) | {
                            "matmul_gflops": gflops,
                            "work": asdict(model.work(batch)),
                            "runs": {
                                name: asdict(r) | {"median_ms": r.median_ms}
                                for name, r in runs.items()
                            },
                            "stages": {name: asdict(t) for name, t in stages.items()},
                            "agreement": words,
                        }
                        report.add([found])
                    print_cells(console, cell.title(), rows)
                    for beams, stages, words in details:
                        print_stages(console, stages, model.work(batch), beams, gflops)
                        console.print(f"  beam {beams} {words}")
    if not all_same:
        console.print("[red]slates differ between methods that share their weights[/red]")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
