"""Every strategy beside `beam` and beside transformers: same weights, histories and trie.

    python benchmarks/strategies.py --json A.json            # beams 50, 256; batch 1, 8, 32
    python benchmarks/strategies.py --threads 1 --clock cpu  # on a machine with other work
    python benchmarks/strategies.py --bundle B               # a trained bundle's own heads
    python benchmarks/tables.py docs/performance.md strategies=A.json

Drawn heads say what `nezha`, `parallel` and `dense` cost; what their answers are worth, and how
many rounds `speculative` and `specgr` save, only trained ones can say (`recserve evaluate
--strategy all`). "warm": the same user again. "event": the user with one new event. "cold": a user
never seen; `generate` is transformers' beam search over the trie, which has no cache between calls.
A cell takes its budget of seconds at most; what is skipped says why.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines.beams import BeamSearch
from baselines.generate import Generate
from baselines.llama import to_llama
from drawn import drawn_catalogue, drawn_recommender, drawn_roots
from measuring import (
    CLOCKS,
    Runs,
    machine,
    matmul_gflops,
    measure,
    silence_transformers,
    write_json,
)
from rich.console import Console
from rich.table import Table

from recserve.bundle import Bundle
from recserve.core.request import RecommendRequest, Request, Root, StrategyName
from recserve.engine.engine import Engine, EngineConfig
from recserve.engine.heads import Heads
from recserve.features.encoding import root_tokens
from recserve.kernels.trie import Trie, build_trie
from recserve.models.dense_retriever import DenseRetriever, RetrieverConfig
from recserve.models.drafters.nezha import SelfDraftConfig, SelfDraftHead
from recserve.models.inputs import NodeInputs
from recserve.models.packing import pack_weights
from recserve.models.recommender import Recommender, load_recommender
from recserve.service.loading import item_index, load_heads
from recserve.training.cases import leave_one_out_cases

HISTORY_TOKENS = 200
RETRIEVER: dict[str, Any] = {
    "width": 512,
    "outcomes": ("event",),
    "outcome_shares": (1.0,),
    "offset_unit": "events",
    "offset_bounds": (0.0, 2.0, 4.0),
    "offset_shares": (0.5, 0.25, 0.25),
}
VISITS = ("warm", "event", "cold")
UNTRAINED = ("speculative", "specgr")
REPEATS = 100


class Subject:
    """An engine and histories to ask it about."""

    def __init__(self, model: Recommender, trie: Trie, heads: Heads, roots: list[Root]) -> None:
        self.model, self.trie, self.roots = model, trie, roots
        decoder = model.config.decoder
        slot = 8 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim
        self.llama = to_llama(model) if model.config.input == "codes" else None
        pack_weights(model.decoder)  # as the server does when it loads a bundle
        self.engine = Engine(model, config=EngineConfig(kv_bytes=slot * 65_536), heads=heads)
        self.index = item_index(model, heads)

    def ask(self, roots: list[Root], width: int, strategy: StrategyName) -> None:
        requests: list[Request] = [
            RecommendRequest(root, self.trie, min(width, 50), width, strategy, index=self.index)
            for root in roots
        ]
        self.engine.run_many(requests)


def grown(model: Recommender, root: Root, item: int) -> Root:
    """The history with one event more."""
    row = item % model.num_bound_items
    if model.config.input == "codes":
        event = model.item_tokens[row]
    else:
        event = torch.tensor([model.config.num_code_tokens + row])
    tokens = torch.cat([root.inputs.tokens, event])
    return Root(NodeInputs(tokens), tokens.numpy())


def drawn_subject(model_shape: str, users: int, dtype: torch.dtype) -> Subject:
    """Beauty's shape, heads as large as trained ones."""
    hidden, layers = (int(part) for part in model_shape.split("x"))
    catalogue = drawn_catalogue(12_101)
    model = drawn_recommender(catalogue, hidden, layers, "children", dtype, level_heads=True)
    heads = []
    for placeholders in (False, True):
        config = SelfDraftConfig(hidden, model.config.codebook_sizes, placeholders)
        heads.append(SelfDraftHead(config).to(dtype).eval())
        heads[-1].start_from(model)
    retriever = DenseRetriever(RetrieverConfig(hidden, **RETRIEVER)).to(dtype).eval()
    roots = drawn_roots(model, HISTORY_TOKENS // model.config.num_levels, users, 0)
    return Subject(model, catalogue.trie, Heads(*heads, retriever), roots)


def trained_subject(path: Path, users: int, dtype: torch.dtype) -> Subject:
    """Test users of a bundle."""
    bundle = Bundle.open(path)
    catalog = bundle.catalog()
    codes = torch.from_numpy(catalog.index.codes.astype(np.int64))
    vectors = torch.from_numpy(catalog.vectors)
    model = load_recommender(bundle.directory("recommender"), codes, vectors).to(dtype)
    config = model.config
    cases = leave_one_out_cases(bundle.events(), "test").sample(users)
    roots = []
    for case in range(len(cases)):
        history = cases.history(case)[-config.max_history_items :]
        tokens = root_tokens(history, catalog.index.codes, config.codebook_sizes, config.input)
        roots.append(Root(NodeInputs(torch.from_numpy(tokens)), tokens))
    return Subject(
        model, build_trie(codes, config.codebook_sizes), load_heads(bundle, model), roots
    )


def visits(
    subject: Subject, width: int, strategy: StrategyName, batch: int, seed: int
) -> dict[str, Callable[[int], None]]:
    """Each kind of visit as a function of the run's number. seed: of the new events, which must
    differ from those that another strategy has left in the cache.
    """
    count = len(subject.roots) // batch

    def group(roots: list[Root], number: int) -> list[Root]:
        first = number % count * batch
        return roots[first : first + batch]

    def warm(number: int) -> None:
        subject.ask(group(subject.roots, number), width, strategy)

    def event(number: int) -> None:
        roots = group(subject.roots, number)
        item = seed * 1000 + number
        subject.ask([grown(subject.model, root, item) for root in roots], width, strategy)

    def cold(number: int) -> None:
        for root in group(subject.roots, number):
            subject.engine.forget(root.keys)
        warm(number)

    for number in range(count):
        warm(number)
    return {"warm": warm, "event": event, "cold": cold}


def transformers_cold(subject: Subject, width: int, batch: int) -> Callable[[int], None]:
    """`generate` of the same weights in a Llama, softmax over the valid children as ours."""
    config = subject.model.config
    search = BeamSearch(subject.trie, config.level_offsets, width, normalise=True)
    prompts = torch.stack([root.inputs.tokens for root in subject.roots])
    generate = Generate(subject.llama, search, prompts.shape[1])
    return lambda number: generate(prompts[torch.arange(batch) + number % 4]) and None


def generate_runs(
    subject: Subject, width: int, batch: int, options: argparse.Namespace, known: dict[int, float]
) -> Runs:
    """Of `generate`, cold. known: milliseconds per call by batch times width, of smaller cells."""
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
    """Runs by strategy and visit."""
    runs: dict[str, dict[str, Runs]] = {}
    for seed, name in enumerate(options.strategies or subject.engine.strategies):
        if name in UNTRAINED and not options.bundle:
            runs[name] = {visit: Runs((), "needs trained heads") for visit in VISITS}
            continue
        calls = visits(subject, width, name, batch, 1 + seed + 100 * width + 10_000 * batch)
        runs[name] = {
            visit: measure(call, REPEATS, options.budget_s, options.clock)
            for visit, call in calls.items()
        }
    if options.generate:
        never = Runs((), "has no cache")
        cold = generate_runs(subject, width, batch, options, known)
        runs["generate"] = {"warm": never, "event": never, "cold": cold}
    return runs


def show(console: Console, title: str, runs: dict[str, dict[str, Runs]]) -> None:
    """Strategies down; median, tail, and how often it fits into beam search's time."""
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
    """As tables.py reads them."""
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", type=Path, help="a trained bundle; default: drawn weights")
    parser.add_argument("--model", default="256x4", help="hidden x layers, where it is drawn")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--beams", nargs="+", type=int, default=[50, 256])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--strategies", nargs="+", help="default: all that the heads allow")
    parser.add_argument("--no-generate", dest="generate", action="store_false")
    parser.add_argument("--longest-call-s", type=float, default=30.0, help="of `generate`")
    parser.add_argument("--users", type=int, default=128)
    parser.add_argument("--budget-s", type=float, default=4.0, help="seconds per cell")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with --threads 1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    silence_transformers()
    torch.set_num_threads(options.threads)
    console = Console()
    content: dict[str, Any] = {"machine": machine() | {"clock": options.clock}, "cells": []}
    console.print(content["machine"])
    dtype: torch.dtype = getattr(torch, options.dtype)
    if options.bundle:
        subject = trained_subject(options.bundle, options.users, dtype)
    else:
        subject = drawn_subject(options.model, options.users, dtype)
    rate = matmul_gflops(512, 256, 1024, dtype, options.clock)
    content["matmul_gflops"] = rate
    known: dict[int, float] = {}
    for batch in options.batches:
        for width in options.beams:
            runs = measured_cell(subject, width, batch, options, known)
            show(console, f"{options.dtype}, beam {width}, batch {batch}", runs)
            content["cells"] += cells_of(runs, width, batch, options)
            if options.json:
                write_json(options.json, content)


if __name__ == "__main__":
    main()
