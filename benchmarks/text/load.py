"""Measures drafts under load on trained models: never, always, and load-aware.

    python -m benchmarks.text.load --target DIR [--draft DIR] [--medusa DIR] --threads 1 --clock cpu

trained_models.py describes the folders and the default. In every round, each method writes the same
wave of texts, with as many concurrent texts as the load says. The first round of a load is a
warm-up. Prints a table per workload. Its last column is the result: tokens/s of load-aware drafts
relative to the better of never and always, as the median of the rounds. The run fails if a text
differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.runs import CLOCKS, machine, write_json
from benchmarks.text.trained_models import PLAIN, options_of, passages, trained_drafter
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.loading import load_language_model
from recserve.models.packing import pack_weights
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.tokenizer.tokenizer import TextTokenizer

ALWAYS, AWARE = "always", "load-aware"


@dataclass
class Waves:
    """One method at one load: tokens/s of each round, and totals of all rounds."""

    rates: list[float] = field(default_factory=list)
    written: int = 0
    steps: int = 0
    drafted: int = 0


@dataclass(frozen=True)
class Row:
    """Medians over the rounds. All ratios are of tokens/s.

    Attributes:
        load: Number of concurrent texts.
        drafter: Name of the drafter.
        plain_tokens_per_s: Tokens/s of plain decoding.
        always: Ratio of always drafting to plain.
        aware: Ratio of load-aware drafting to plain.
        to_better: Ratio of load-aware drafting to the better of plain and always.
        per_step: Tokens of a text per step, by method.
        drafted: Draft nodes of a text per step, by method.
    """

    load: int
    drafter: str
    plain_tokens_per_s: float
    always: float
    aware: float
    to_better: float
    per_step: dict[str, float]
    drafted: dict[str, float]


class Bench:
    """Two engines on the same weights: one always drafts, one drafts as the load permits."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.now = options, CLOCKS[options.clock]
        target = load_language_model(options.target)
        made = [
            {name: trained_drafter(name, target, options) for name in options.drafters}
            for _ in range(2)
        ]
        self.weights = sum(w.numel() for w in target.parameters())
        pack_weights(target)
        self.engines = {
            name: build_engine(
                EngineModels(text=target, drafters=drafters), EngineConfig(load_aware=aware)
            )
            for name, drafters, aware in ((ALWAYS, made[0], False), (AWARE, made[1], True))
        }

    def write(self, method: str, drafter: str, prompts: list[list[int]], waves: Waves) -> Any:
        """Writes a wave of concurrent texts."""
        engine = self.engines[AWARE if method == AWARE else ALWAYS]
        engine.forget_all()
        options = self.options
        requests: list[Any] = [
            TextQuery(
                np.array(prompt),
                SamplingParams(options.temperature, max_tokens=options.tokens, seed=seed),
                Speculation(PLAIN if method == PLAIN else drafter),
            )
            for seed, prompt in enumerate(prompts)
        ]
        began = self.now()
        answers: list[Any] = engine.run_many(requests)
        waves.rates.append(sum(len(a.tokens) for a in answers) / (self.now() - began))
        for answer in answers:
            waves.written += len(answer.tokens)
            waves.steps += answer.timing.forwards
            waves.drafted += answer.counts.num_draft_tokens
        return [answer.tokens.tolist() for answer in answers]

    def row(self, load: int, drafter: str, prompts: list[list[int]]) -> tuple[Row, int]:
        """Returns one cell, and the number of texts that differ from plain decoding's."""
        differ, waves = 0, {method: Waves() for method in (PLAIN, ALWAYS, AWARE)}
        for number in range(self.options.rounds + 1):
            start = number * load
            own = [prompts[(start + i) % len(prompts)] for i in range(load)]
            # The order of the methods alternates between rounds.
            order = list(waves)[:: 1 if number % 2 else -1]
            texts = {method: self.write(method, drafter, own, waves[method]) for method in order}
            differ += sum(texts[m] != texts[PLAIN] for m in (ALWAYS, AWARE))
        plain, always, aware = (np.array(waves[m].rates[1:]) for m in waves)
        row = Row(
            load,
            drafter,
            float(np.median(plain)),
            float(np.median(always / plain)),
            float(np.median(aware / plain)),
            float(min(np.median(aware / plain), np.median(aware / always))),
            {m: w.written / w.steps for m, w in waves.items()},
            {m: w.drafted / w.steps for m, w in waves.items()},
        )
        return row, differ


def print_rows(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left")
    columns = ("at once", "drafter", "plain tokens/s", ALWAYS, AWARE, "to the better")
    for column in (*columns, "tokens per step", "nodes drafted"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for row in rows:
        table.add_row(
            str(row.load),
            row.drafter,
            f"{row.plain_tokens_per_s:.0f}",
            *(f"{value:.3f}" for value in (row.always, row.aware, row.to_better)),
            *(f"{of[ALWAYS]:.2f}, {of[AWARE]:.2f}" for of in (row.per_step, row.drafted)),
        )
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__, tokens=64)
    parser.add_argument("--drafters", nargs="+", default=["ngram"], help="drafters to measure")
    parser.add_argument(
        "--loads", nargs="+", type=int, default=[1, 8, 32], help="numbers of concurrent texts"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds per load")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with --threads 1")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 160)
    bench = Bench(options)
    prompts = passages(TextTokenizer.open(options.target), 64, options.length)
    facts = machine() | {"clock": options.clock}
    console.print(facts)
    rows, differ = [], 0
    for load in options.loads:
        for drafter in options.drafters:
            row, wrong = bench.row(load, drafter, prompts)
            rows.append(row)
            differ += wrong
    title = (
        f"{bench.weights / 1e6:.1f} M weights · {options.rounds} rounds of {options.tokens} tokens "
        f"a text · temperature {options.temperature:g}"
    )
    print_rows(console, title, rows)
    if options.json:
        cells = [asdict(row) for row in rows]
        write_json(options.json, {"machine": facts, "weights": bench.weights, "cells": cells})
    if differ:
        console.print(f"[red]{differ} waves differ from plain decoding[/red]")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
