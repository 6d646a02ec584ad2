"""Measures how long a small request waits behind one request of the largest accepted size.

    python -m benchmarks.server.waits [--threads 2] [--json F]

One engine runs models of the size of `recserve demo` with drawn weights. While a large request of
each kind runs, small requests follow each other: a cached user's slate, and a text of two tokens.
Prints the time of the large request and the longest wait of a small one. A body of many prompts or
documents becomes many requests of the engine, all queued at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.drawn import (
    drawn_catalogue,
    drawn_prefixes,
    drawn_ranker,
    drawn_ranking_prefix,
    drawn_recommender,
)
from benchmarks.support.runs import machine, write_json
from recserve.core.request import (
    LikelihoodQuery,
    Prefix,
    PromptQuery,
    RankQuery,
    SlateQuery,
    TextScoreQuery,
)
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.config import DecoderConfig
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.packing import pack_weights
from recserve.speculation.completion import GROUP_COST, OUTPUT_COST, TextQuery
from recserve.speculation.sampling_params import SamplingParams

MOST_ITEMS = 4096  # candidates and documents that a body may have
VOCABULARY = 2000


def language_model(layers: int, hidden: int) -> LanguageModel:
    """Returns a random language model."""
    torch.manual_seed(0)
    heads = hidden // 32
    decoder = DecoderConfig(hidden, layers, heads, heads, 32, 3 * hidden, max_positions=1024)
    model = LanguageModel(LanguageModelConfig(decoder, VOCABULARY)).requires_grad_(False).eval()
    pack_weights(model)
    return model


class Requests:
    """An engine with three models, and the requests that it gets."""

    def __init__(self, size: int) -> None:
        """Builds the engine. `size` is the hidden size of all models."""
        catalogue = drawn_catalogue(12_101)
        self.trie, self.rng = catalogue.trie, np.random.default_rng(0)
        self.recommender = drawn_recommender(catalogue, size, 2, "children", torch.float32)
        self.recommender.pack()
        self.ranker = drawn_ranker(12_101, size, 2)
        text = language_model(2, size)
        models = EngineModels(self.recommender, self.ranker, text=text)
        self.engine = build_engine(models, EngineConfig(kv_bytes=2**28))
        (root,) = drawn_prefixes(self.recommender, 50, 1, 99)
        self.slate = SlateQuery(prefix=root, trie=self.trie, k=10, beam_width=10)

    def text(self, prompt: int, tokens: int, before: int = 0) -> TextQuery:
        """Returns a completion of a random prompt, with so many equal ones before it in its
        body.
        """
        params = SamplingParams(temperature=0, max_tokens=tokens)
        group = before * (prompt + OUTPUT_COST * tokens) // GROUP_COST
        return TextQuery(self.rng.integers(0, VOCABULARY, prompt), params, group=group)

    def large(self, kind: str, seed: int) -> list[Any]:
        """Returns the requests of one body of the largest size, for a user who is not cached."""
        (root,) = drawn_prefixes(self.recommender, 50, 1, seed)
        empty = Prefix(NodeInputs(torch.empty(0, dtype=torch.int64)), np.empty(0, np.int64))
        match kind:
            case "recommend":
                return [SlateQuery(prefix=root, trie=self.trie, k=200, beam_width=500)]
            case "rank, likelihood":
                return [LikelihoodQuery(root, self.trie, np.arange(MOST_ITEMS))]
            case "rank":
                history = drawn_ranking_prefix(self.ranker, 1000, seed)
                pick = torch.arange(MOST_ITEMS) % len(history.inputs)
                return [RankQuery(history, history.inputs.select(pick))]
            case "rerank":
                tokens = self.rng.integers(0, VOCABULARY, 8 * MOST_ITEMS)
                offsets = np.arange(0, 8 * MOST_ITEMS + 1, 8)
                query = self.rng.integers(0, VOCABULARY, 500)
                prefix = Prefix(NodeInputs(torch.from_numpy(query)), query)
                return [
                    TextScoreQuery(prefix, tokens[8 * a : 8 * a + 4096], offsets[:513], (1, 2))
                    for a in range(0, MOST_ITEMS, 512)
                ]
            case "embeddings":
                texts = self.rng.integers(0, VOCABULARY, (256, 500))
                return [PromptQuery(empty, text, mean=True) for text in texts]
            case _:
                return [self.text(500, 64, number) for number in range(128)]


KINDS = (
    "recommend",
    "rank, likelihood",
    "rank",
    "rerank",
    "embeddings",
    "completions",
)


def wait_behind(engine: Engine, large: list[Any], small: Any) -> tuple[float, float]:
    """Returns the ms of the large requests, and the longest ms of a small one meanwhile."""
    began, longest = time.perf_counter(), 0.0
    with engine.held():
        futures = [engine.submit(request) for request in large]
    while not all(future.done() for future in futures):
        asked = time.perf_counter()
        engine.submit(small).result()
        longest = max(longest, time.perf_counter() - asked)
    return (time.perf_counter() - began) * 1e3, longest * 1e3


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes the waits behind each kind of request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=128, help="hidden size of all models")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    made, rows = Requests(options.size), []
    engine = made.engine
    engine.run_many([made.slate])
    engine.start()
    for seed, kind in enumerate(options.kinds):
        small = {"slate": made.slate, "text": made.text(8, 2)}
        row: dict[str, Any] = {"kind": kind}
        for number, (name, request) in enumerate(small.items()):
            whole, longest = wait_behind(engine, made.large(kind, 10 * seed + number), request)
            row |= {"ms": round(whole), f"{name} waits, ms": round(longest, 1)}
        rows.append(row)
    engine.close()
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
