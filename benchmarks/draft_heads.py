"""Strategies that draft with a head beside `beam`: same drawn weights, histories and trie.

    python benchmarks/draft_heads.py                               # 256 x 4, beams 50 and 256, wall
    python benchmarks/draft_heads.py --threads 1 --clock cpu       # on a machine with other work
    python benchmarks/draft_heads.py --bundle B --beams 10 50 200  # a trained bundle's heads, warm

Drawn heads say what `nezha` costs; what its answers are worth, and how many rounds `speculative`
saves, only trained ones can say. "warm": the same user again. "event": the user with one new event.
"cold": a user never seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawn import drawn_catalogue, drawn_recommender, drawn_roots
from measuring import CLOCKS, Runs, machine, measure, write_json
from rich.console import Console
from rich.table import Table

from recserve.bundle import Bundle
from recserve.core.request import RecommendRequest, Request, Root, StrategyName
from recserve.engine.engine import Engine, EngineConfig
from recserve.engine.heads import Heads
from recserve.features.encoding import root_tokens
from recserve.kernels.trie import Trie, build_trie
from recserve.models.drafters.nezha import SelfDraftConfig, SelfDraftHead
from recserve.models.inputs import NodeInputs
from recserve.models.recommender import Recommender, load_recommender
from recserve.service.loading import load_heads
from recserve.training.cases import leave_one_out_cases

HISTORY_TOKENS = 200


class Subject:
    """An engine and histories to ask it about."""

    def __init__(self, model: Recommender, trie: Trie, heads: Heads, roots: list[Root]) -> None:
        self.model, self.trie, self.roots = model, trie, roots
        decoder = model.config.decoder
        slot = 8 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim
        self.engine = Engine(model, config=EngineConfig(kv_bytes=slot * 32_768), heads=heads)

    def ask(self, roots: list[Root], width: int, strategy: StrategyName) -> None:
        requests: list[Request] = [
            RecommendRequest(root, self.trie, min(width, 50), width, strategy) for root in roots
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


def drawn_subject(model_shape: str, users: int) -> Subject:
    """Beauty's shape, heads as large as trained ones."""
    hidden, layers = (int(part) for part in model_shape.split("x"))
    catalogue = drawn_catalogue(12_101)
    model = drawn_recommender(catalogue, hidden, layers, "children", torch.float32)
    heads = []
    for placeholders in (False, True):
        config = SelfDraftConfig(hidden, model.config.codebook_sizes, placeholders)
        heads.append(SelfDraftHead(config).eval())
        heads[-1].start_from(model)
    roots = drawn_roots(model, HISTORY_TOKENS // model.config.num_levels, users, 0)
    return Subject(model, catalogue.trie, Heads(*heads), roots)


def trained_subject(path: Path, users: int) -> Subject:
    """Test users of a bundle."""
    bundle = Bundle.open(path)
    catalog = bundle.catalog()
    codes = torch.from_numpy(catalog.index.codes.astype(np.int64))
    vectors = torch.from_numpy(catalog.vectors)
    model = load_recommender(bundle.directory("recommender"), codes, vectors)
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
    more = [grown(subject.model, r, seed * 1000 + n) for n, r in enumerate(subject.roots)]
    count = len(subject.roots) // batch

    def group(roots: list[Root], number: int) -> list[Root]:
        first = number % count * batch
        return roots[first : first + batch]

    def warm(number: int) -> None:
        subject.ask(group(subject.roots, number), width, strategy)

    def event(number: int) -> None:
        subject.ask(group(more, number), width, strategy)

    def cold(number: int) -> None:
        for root in group(subject.roots, number):
            subject.engine.forget(root.keys)
        warm(number)

    for number in range(count):
        warm(number)
    return {"warm": warm, "event": event, "cold": cold}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", type=Path, help="a trained bundle; default: drawn weights")
    parser.add_argument("--model", default="256x4", help="hidden x layers, where it is drawn")
    parser.add_argument("--beams", nargs="+", type=int, default=[50, 256])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--users", type=int, default=40)
    parser.add_argument("--budget-s", type=float, default=4.0, help="seconds per cell")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with --threads 1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    content: dict[str, Any] = {"machine": machine() | {"clock": options.clock}, "cells": []}
    if options.bundle:
        subject = trained_subject(options.bundle, options.users)
    else:
        subject = drawn_subject(options.model, options.users)
    strategies: list[Any] = [name for name in subject.engine.strategies if name != "speculative"]
    if options.bundle and "speculative" in subject.engine.strategies:
        strategies.append("speculative")
    seed, repeats = 0, len(subject.roots) // options.batch - 1
    for width in options.beams:
        runs: dict[str, dict[str, Runs]] = {}
        for name in strategies:
            seed += 1
            calls = visits(subject, width, name, options.batch, seed)
            runs[name] = {
                visit: measure(call, repeats, options.budget_s, options.clock)
                for visit, call in calls.items()
            }
        table = Table(title=f"beam {width}, batch {options.batch}", title_justify="left")
        table.add_column("ms per batch, median")
        for visit in ("warm", "event", "cold"):
            table.add_column(visit, justify="right")
            table.add_column("beam / it", justify="right")
        for name, cells in runs.items():
            row = [name]
            for visit, cell in cells.items():
                row += [cell.words(), f"{runs['beam'][visit].median_ms / cell.median_ms:.1f}"]
                content["cells"].append(
                    {"beams": width, "strategy": name, "visit": visit, "ms": cell.median_ms}
                )
            table.add_row(*row)
        console.print(table)
    if options.json:
        write_json(options.json, content)


if __name__ == "__main__":
    main()
