"""Measures strategy `rpg` on a trained bundle: recall and cost of the walk over the item graph.

    OMP_NUM_THREADS=1 python -m benchmarks.recommend.rpg --bundle B [--beside B2] [--users 1000]

The first table compares the walk with exhaustive scoring, for several graphs and widths. It prints
how many of the ten best items the walk finds, and which share of the catalogue it scores. The walk
starts from entries and the user's latest items, from entries alone, or from random items as in RPG.
The second table prints milliseconds per request of warm users through the engine. Beam search of
the bundle named by --beside is measured for comparison.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.support.runs import CLOCKS, measure
from recserve.bundle.bundle import Bundle
from recserve.core.request import Prefix, Request, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.evaluation.cases import leave_one_out_cases
from recserve.features.tables.encoding import window_start
from recserve.features.vectors.item_graph import EDGES, link_items
from recserve.kernels.item_graph import GraphWalk, ItemGraph, best_of_all, rows_of, search
from recserve.kernels.trie.trie import Trie, build_trie
from recserve.models.attention import DenseAttention
from recserve.models.inputs import NodeInputs
from recserve.models.recommender import Recommender, load_recommender
from recserve.search.strategies.rpg import NUM_RECENT_ITEMS, WALK_STEPS, latest_items

TOP = 10
BATCH = 64


class Served:
    """A bundle's recommender with requests of some of its test users."""

    def __init__(self, folder: Path, users: int) -> None:
        bundle = Bundle.open(folder)
        catalog = bundle.catalog()
        self.codes = catalog.semantic_ids.codes
        codes = torch.from_numpy(self.codes.astype(np.int64))
        self.model: Recommender = load_recommender(
            bundle.directory("recommender"), codes, torch.from_numpy(catalog.vectors)
        )
        self.trie: Trie = build_trie(codes, self.model.config.codebook_sizes)
        self.weight = float(bundle.manifest.recommender.get("dense_weight", 0.0))
        cases = leave_one_out_cases(bundle.events(), "test").sample(users)
        self.histories = [cases.history(case) for case in range(len(cases))]

    def prefix(self, history: np.ndarray) -> Prefix:
        size = self.model.template.max_items
        rows = history[window_start(len(history), size, max(1, size // 4)) :]
        tokens = self.model.template.tokens(rows, self.codes)
        return Prefix(NodeInputs(torch.from_numpy(tokens)), tokens)

    def requests(self, strategy: str, graph: ItemGraph | None = None) -> list[SlateQuery]:
        weight = self.weight if strategy == "beam" else 0.0
        return [
            SlateQuery(
                prefix=self.prefix(h),
                trie=self.trie,
                k=TOP,
                beam_width=50,
                strategy=strategy,  # type: ignore[arg-type]
                excluded=h,
                dense_weight=weight,
                graph=graph,
            )
            for h in self.histories
        ]

    def graph(self, edges: int) -> ItemGraph:
        levels = range(self.model.config.num_levels)
        links = link_items(
            self.codes, [self.model.level_codes(n).detach().numpy() for n in levels], edges
        )
        return ItemGraph(torch.from_numpy(links.neighbours), torch.from_numpy(links.entries))


@torch.inference_mode()
def states(served: Served) -> Iterator[tuple[list[SlateQuery], Tensor]]:
    """Yields batches of requests with log-probabilities [B, V] of each token at its level."""
    tables, requests = served.model.level_tables(), served.requests("rpg")
    for start in range(0, len(requests), BATCH):
        part = requests[start : start + BATCH]
        tokens = [r.prefix.inputs.tokens for r in part]
        padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        hidden = served.model(padded, torch.arange(padded.shape[1]), DenseAttention())
        last = torch.tensor([len(t) - 1 for t in tokens])
        yield part, tables.log_probs(hidden[torch.arange(len(part)), last])


@torch.inference_mode()
def walks(served: Served) -> Table:
    """Returns the table of recall of the exhaustive ten best against the share of scored items."""
    table = Table("edges", "followed", "start", "recall", "items scored", title="walks")
    tokens, items = served.model.item_tokens, len(served.codes)
    batches = list(states(served))
    exact = [rows_of(best_of_all(p, tokens, None, TOP)) for _, p in batches]
    generator = torch.Generator().manual_seed(0)
    first = served.model.config.num_code_tokens
    for edges in (EDGES // 2, EDGES):
        began = time.process_time()
        graph = served.graph(edges)
        seconds = time.process_time() - began
        for width in (20, 50):
            for name in ("entries and latest", "entries", "random"):
                hits = scored = 0
                used = replace(graph, entries=graph.entries[:0]) if name == "random" else graph
                for (part, log_probs), best in zip(batches, exact, strict=True):
                    seeds = torch.full((len(part), 1), -1)
                    if name == "entries and latest":
                        seeds = latest_items(part, items, first)
                    elif name == "random":
                        drawn = (len(part), len(graph.entries) + NUM_RECENT_ITEMS)
                        seeds = torch.randint(items, drawn, generator=generator)
                    found = search(
                        used, log_probs, tokens, seeds, None, GraphWalk(TOP, width, WALK_STEPS)
                    )
                    rows = rows_of(found.best)
                    hits += int((rows[:, :, None] == best[:, None]).sum())
                    scored += int(found.num_scored.sum())
                users = len(served.histories)
                share = f"{scored / users / items:.1%}"
                row = (str(edges), str(width), name, f"{hits / users / TOP:.4f}", share)
                table.add_row(*row)
        table.caption = (
            f"{edges} edges: {seconds:.1f} processor s, {graph.neighbours.nbytes:,} bytes"
        )
    return table


def times(served: Served, beside: Served | None, clock: str) -> Table:
    """Returns the table of milliseconds per batch of warm users."""
    table = Table("strategy", "1 request", "8 requests", title=f"ms, {clock} clock, warm users")
    graph = served.graph(EDGES)
    cells = {
        "parallel, all items": (served, served.requests("rpg")),
        "parallel, item graph": (served, served.requests("rpg", graph)),
    }
    if beside is not None:
        cells["beam 50, the bundle beside"] = (beside, beside.requests("beam"))
    for name, (owner, requests) in cells.items():
        engine = build_engine(EngineModels(owner.model))
        few: list[Request] = list(requests[:200])
        engine.run_many(few)
        calls = (batches_of(engine, few, size) for size in (1, 8))
        words = [measure(call, 200, 60.0, clock).words() for call in calls]
        table.add_row(name, *words)
    return table


def batches_of(engine: Engine, requests: list[Request], size: int) -> Callable[[int], None]:
    """Returns a function whose n-th call answers the n-th batch, cyclically."""

    def call(number: int) -> None:
        start = number * size % (len(requests) - size)
        engine.run_many(requests[start : start + size])

    return call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True, help="bundle to measure")
    parser.add_argument(
        "--beside", type=Path, help="bundle whose beam search is timed for comparison"
    )
    parser.add_argument("--users", type=int, default=1000, help="number of users")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: with OMP_NUM_THREADS=1"
    )
    asked = parser.parse_args()
    served = Served(asked.bundle, asked.users)
    beside = None if asked.beside is None else Served(asked.beside, asked.users)
    console = Console()
    console.print(walks(served))
    console.print(times(served, beside, asked.clock))


if __name__ == "__main__":
    main()
