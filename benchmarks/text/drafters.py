"""Measures every drafter on trained models: drafted tokens, accepted tokens and speed.

    python -m benchmarks.text.drafters --target DIR [--draft DIR] [--medusa DIR] --json F.json

trained_models.py describes the folders and the default. The texts continue passages of the
validation books and prompts of Spec-Bench. The methods take turns, prompt by prompt. With
--load-aware, every drafter also runs in the load-aware mode, which drafts only if it pays under the
current load. Prints a table per workload. kappa is tokens per step with a draft, times levels per
drafted token (SpeculationCounts). The run fails if a text differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.runs import CLOCKS, machine, write_json
from benchmarks.text.trained_models import (
    PLAIN,
    drafters_of,
    options_of,
    passages,
    questions,
    trained_drafter,
)
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.loading import load_language_model
from recserve.models.packing import pack_weights
from recserve.speculation.completion import Completion, SpeculationCounts, TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.tokenizer.tokenizer import TextTokenizer

LOAD_AWARE = ", load-aware"
POSITIONS = 5  # draft depths whose acceptance the table shows


@dataclass
class Tally:
    """Sums over the prompts of one workload; `accepted[d]` and others as in SpeculationCounts."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafted: int = 0
    drafts: int = 0
    levels: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * 64)
    differ: int = 0

    def add(self, answer: Completion) -> None:
        counts = answer.counts
        self.tokens += len(answer.tokens)
        self.steps += answer.timing.forwards
        self.drafts += counts.num_drafts
        self.drafted += counts.num_draft_tokens
        self.levels += counts.num_draft_levels
        for depth, kept in enumerate(counts.per_position):
            self.accepted[depth] += kept

    def row(self, plain: Tally) -> dict[str, Any]:
        """Returns the published figures, relative to plain decoding."""
        by_position = [n / max(self.drafts, 1) for n in self.accepted[:POSITIONS]]
        counts = SpeculationCounts(
            num_drafts=self.drafts,
            num_draft_tokens=self.drafted,
            num_accepted_tokens=sum(self.accepted),
            num_draft_levels=self.levels,
        )
        rate, own = plain.tokens / plain.seconds, self.tokens / self.seconds
        return {
            "tokens_per_step": self.tokens / self.steps,
            "kappa": counts.kappa,
            "acceptance_rate": sum(self.accepted) / max(self.drafted, 1),
            "acceptance_by_position": by_position,
            "drafted_per_step": self.drafted / self.steps,
            "tokens_per_s": own,
            "ratio": own / rate,
            "differ": self.differ,
        }


@dataclass(frozen=True)
class Method:
    """A drafter in one of the engines, which all have the same weights."""

    engine: Engine
    drafter: str


def measure(
    methods: dict[str, Method], prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, Tally]:
    """Runs every method on every prompt."""
    tallies = {name: Tally() for name in methods}
    now = CLOCKS[options.clock]
    # Noise is keyed by (seed, position), so each text needs its own seed.
    params = [
        SamplingParams(temperature=options.temperature, max_tokens=options.tokens, seed=seed)
        for seed in range(len(prompts))
    ]
    for start in range(0, len(prompts), options.together):
        truth: list[list[int]] = []
        for name, method in methods.items():
            method.engine.forget_all()
            requests = [
                TextQuery(np.array(prompts[i]), params[i], Speculation(method.drafter))
                for i in range(start, min(start + options.together, len(prompts)))
            ]
            began = now()
            answers: list[Any] = method.engine.run_many(list[Any](requests))
            tally = tallies[name]
            tally.seconds += now() - began
            for answer in answers:
                tally.add(answer)
            texts = [answer.tokens.tolist() for answer in answers]
            truth = truth or texts
            tally.differ += sum(a != b for a, b in zip(truth, texts, strict=True))
    return tallies


def print_rows(console: Console, title: str, rows: dict[str, dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("drafter", "tokens per step", "drafted per step", "kappa", "accepted"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    table.add_column(f"of the drafts, kept at depth 1..{POSITIONS}", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("ratio to plain", justify="right")
    for name, row in rows.items():
        positions = " ".join(f"{share:.2f}" for share in row["acceptance_by_position"])
        table.add_row(
            name,
            f"{row['tokens_per_step']:.2f}",
            f"{row['drafted_per_step']:.1f}",
            f"{row['kappa']:.2f}",
            f"{row['acceptance_rate']:.1%}",
            positions if name != PLAIN else "",
            f"{row['tokens_per_s']:.0f}",
            f"{row['ratio']:.2f}",
        )
    console.print(table)


def save_plot(path: Path, workloads: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Draws tokens per step, and tokens/s relative to plain, with a panel per workload."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(workloads), figsize=(10, 3.6), sharey=True)
    for panel, (title, rows) in zip(np.atleast_1d(panels), workloads.items(), strict=True):
        places = np.arange(len(rows))
        for shift, name, label in (
            (0.2, "tokens_per_step", "tokens per step"),
            (-0.2, "ratio", "tokens/s, plain decoding = 1"),
        ):
            panel.barh(places + shift, [row[name] for row in rows.values()], 0.38, label=label)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set(title=title, yticks=places, yticklabels=list(rows))
    panel.invert_yaxis()
    figure.legend(*panel.get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110)


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__, tokens=96)
    parser.add_argument(
        "--prompts", type=int, default=26, help="number of prompts of each workload"
    )
    parser.add_argument("--together", type=int, default=1, help="number of concurrent prompts")
    parser.add_argument("--drafters", nargs="+", help="only these and plain decoding")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature")
    parser.add_argument("--load-aware", action="store_true", help="also measure load-aware drafts")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with --threads 1")
    parser.add_argument("--plot", type=Path, help="path of a plot of the tables")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 160)
    target, tokenizer = load_language_model(options.target), TextTokenizer.open(options.target)
    names = drafters_of(options)
    kinds = {"": False} | ({LOAD_AWARE: True} if options.load_aware else {})
    drafters = {
        kind: {name: trained_drafter(name, target, options) for name in names} for kind in kinds
    }
    pack_weights(target)
    engines = {
        kind: build_engine(
            EngineModels(text=target, drafters=drafters[kind]), EngineConfig(load_aware=aware)
        )
        for kind, aware in kinds.items()
    }
    methods = {
        name + kind: Method(engines[kind], name)
        for name in names
        for kind in kinds
        if name != PLAIN or not kind
    }
    room = target.config.decoder.max_positions - options.tokens
    workloads = {
        "books": passages(tokenizer, options.prompts, min(options.length, room)),
        "Spec-Bench": questions(tokenizer, options.prompts, room),
    }
    size = sum(w.numel() for w in load_language_model(options.target).parameters())
    content: dict[str, Any] = {
        "machine": machine() | {"clock": options.clock},
        "options": {k: str(v) for k, v in vars(options).items() if k != "json"},
        "weights": size,
        "workloads": {},
    }
    console.print(content["machine"])
    differ = 0
    for title, prompts in workloads.items():
        measure(methods, prompts[:1], options)  # warm-up
        for kind, engine in engines.items():
            for drafter in ("suffix", "suffix+draft_model"):
                if drafter in drafters[kind]:  # forget earlier outputs, which equal this text
                    engine.drafters[drafter] = trained_drafter(drafter, target, options)
        tallies = measure(methods, prompts, options)
        rows = {name: tally.row(tallies[PLAIN]) for name, tally in tallies.items()}
        differ += sum(tally.differ for tally in tallies.values())
        print_rows(
            console,
            f"{title} · {size / 1e6:.1f} M weights · {len(prompts)} prompts, {options.together} at "
            f"once · {options.tokens} tokens each · temperature {options.temperature:g}",
            rows,
        )
        content["workloads"][title] = {"rows": rows} | {
            "sums": {name: asdict(tally) for name, tally in tallies.items()}
        }
    if options.json:
        write_json(options.json, content)
    if options.plot:
        save_plot(options.plot, {t: found["rows"] for t, found in content["workloads"].items()})
    if differ:
        console.print(f"[red]{differ} texts differ from plain decoding[/red]")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
