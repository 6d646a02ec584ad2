"""Trains every kind of drafter on the same text for the same time, and measures all drafters.

    python -m benchmarks.text.drafter_comparison --target DIR --text DISTILLED --work WORK
    python -m benchmarks.text.drafter_comparison --work WORK --table --plot FIGURE.svg

The text is a folder of `recserve train distill`. A run that is interrupted continues with the same
command: WORK/trained holds one folder for each kind, WORK/rows.jsonl one line for each measured
row, and neither is made twice. A row is one drafter with one tree at one batch size and
temperature. It runs beside plain decoding, in turns, and fails if a text differs.

Trees: `tree` is the drafter's own, `tree-N` has at most N nodes, `chain` and `chain-N` do not fork,
`static` is EAGLE-1's tree of 25 nodes, for drafters that follow a request's tree.
The prompts are passages of the validation books. They are in the prefix cache when the clock
starts, so the figures are those of decoding. The draft cost is the time of a draft, as a share of
the target's forward pass in plain decoding at the same batch size. A drafter that was trained with
its target (Medusa-2) is measured beside plain decoding of that target.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.support.runs import CLOCKS, machine
from benchmarks.text.comparison_report import print_tables, save_plot
from benchmarks.text.comparison_training import (
    TRAINED,
    TRAINERS,
    check_facts,
    train_all,
    weights_of,
)
from benchmarks.text.drafters import Method, Tally
from benchmarks.text.trained_models import PLAIN, passages
from recserve.drafters.registry import (
    build_drafter,
    drafter_classes,
    weightless_drafters,
)
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.loading import load_language_model
from recserve.models.packing import pack_weights
from recserve.speculation.completion import Completion, TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.speculation.verifiers.registry import verifiers
from recserve.speculation.verifiers.sample import SampleRule
from recserve.tokenizer.tokenizer import TextTokenizer
from recserve.training.text.distilled_text import target_sha256

# Ranks of the nodes of EAGLE-1's published tree (`mc_sim_7b_63`): 4 + 8 + 8 + 3 + 2 by depth.
EAGLE_1 = tuple(
    tuple(map(int, path))
    for path in (
        *("0", "1", "2", "3", "00", "01", "02", "10", "11", "20", "21", "30"),
        *("000", "001", "002", "010", "011", "020", "021", "100"),
        *("0000", "0001", "0002", "00000", "00001"),
    )
)
TURNS = 2  # groups of prompts; the methods take turns group by group
ROWS = "rows.jsonl"
# What the rows of a table must share.
SHARED = ("prompts", "length", "tokens", "threads", "clock")


class SampleChains(SampleRule):
    """The rule `sample` for drafts without forks, which drafters then propose."""

    name = "sample_chains"
    only_chains = True


@dataclass(frozen=True)
class Arm:
    """A drafter, with the folders of its weights, and the target that was trained with it."""

    name: str
    drafter: str
    folders: tuple[Path, ...] = ()
    target: Path | None = None


@dataclass(frozen=True)
class Cell:
    """What one row measures."""

    arm: Arm
    tree: str
    batch: int
    temperature: float

    @property
    def key(self) -> tuple[str, str, int, float]:
        return self.arm.name, self.tree, self.batch, self.temperature

    @property
    def speculation(self) -> Speculation:
        kind, _, number = self.tree.partition("-")
        rule = SampleChains.name if kind == "chain" else SampleRule.name
        tree = EAGLE_1 if kind == "static" else None
        return Speculation(self.arm.drafter, rule, int(number) if number else None, tree)


@dataclass
class TimedTally(Tally):
    """Sums over texts, with the time of drafts and of forward passes.

    Each text counts the whole step, so the mean over texts is the mean over steps.
    """

    texts: int = 0
    nodes: int = 0
    draft_ms: float = 0.0
    forward_ms: float = 0.0

    def add(self, answer: Completion) -> None:
        super().add(answer)
        self.texts += 1
        self.nodes += answer.timing.nodes
        self.draft_ms += answer.timing.draft_ms
        self.forward_ms += answer.timing.verify_ms

    def sums(self) -> dict[str, Any]:
        """Returns the sums, without the depths at which nothing was accepted."""
        deepest = max((depth for depth, kept in enumerate(self.accepted, 1) if kept), default=0)
        return asdict(self) | {"accepted": self.accepted[:deepest]}

    @property
    def later_steps(self) -> int:
        """Steps after the first of each text, which ends its prompt and has no draft."""
        return max(self.steps - self.texts, 1)


def arms_of(kinds: list[str], options: argparse.Namespace) -> list[Arm]:
    """Returns the drafters without weights, and those that read the folders of the kinds.

    Several drafters may read one folder; each of them is an arm.
    """
    arms = [Arm(name, name) for name in weightless_drafters() if not drafter_classes()[name].idle]
    for kind in kinds:
        folder = options.work / "trained" / kind
        if not (folder / TRAINED).is_file():
            continue
        folders, own = weights_of(folder)
        target, readers = load_language_model(own or options.target), []
        for name, cls in drafter_classes().items():
            if not cls.needs_weights:
                continue
            try:
                build_drafter(name, target, folders)
            except (ValueError, OSError):
                continue
            readers.append(name)
        names = [kind] if len(readers) == 1 else readers
        pairs = zip(names, readers, strict=True)
        arms += [Arm(name, reader, folders, own) for name, reader in pairs]
    return arms


def measure(cell: Cell, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of a row, measured beside plain decoding."""
    target = load_language_model(cell.arm.target or options.target)
    drafter = build_drafter(cell.arm.drafter, target, cell.arm.folders)
    pack_weights(target)
    config, name = EngineConfig(max_running=cell.batch, load_aware=False), cell.arm.drafter
    drafting = EngineModels(text=target, drafters={name: drafter})
    methods = {
        PLAIN: Method(build_engine(EngineModels(text=target), config), PLAIN),
        name: Method(build_engine(drafting, config), name),
    }
    speculation = {PLAIN: Speculation(), name: cell.speculation}
    tallies = {method: TimedTally() for method in methods}
    now = CLOCKS[options.clock]

    def write(method: str, numbers: list[int], tokens: int) -> list[Completion]:
        requests = []
        for number in numbers:
            params = SamplingParams(cell.temperature, max_tokens=tokens, seed=number)
            requests.append(TextQuery(np.array(prompts[number]), params, speculation[method]))
        return methods[method].engine.run_many(requests)

    for method in methods:
        write(method, [0], 8)  # warm-up, with a prompt that is not measured
    for turn, numbers in enumerate(np.array_split(np.arange(1, len(prompts)), TURNS)):
        texts = {}
        for method in (name, PLAIN) if turn % 2 else (PLAIN, name):
            methods[method].engine.forget_all()
            write(method, numbers.tolist(), 1)  # into the prefix cache
            began = now()
            answers = write(method, numbers.tolist(), options.tokens)
            tallies[method].seconds += now() - began
            for answer in answers:
                tallies[method].add(answer)
            texts[method] = [answer.tokens.tolist() for answer in answers]
        pairs = zip(texts[PLAIN], texts[name], strict=True)
        tallies[name].differ += sum(a != b for a, b in pairs)
    return {"figures": figures(tallies[name], tallies[PLAIN])} | {
        "sums": {method: tally.sums() for method, tally in tallies.items()}
    }


def figures(own: TimedTally, plain: TimedTally) -> dict[str, Any]:
    """Returns the published figures of a row."""
    forward_ms = plain.forward_ms / plain.later_steps
    return own.row(plain) | {
        "drafts": own.drafts,
        "nodes_per_step": own.nodes / own.steps,
        "draft_share": own.draft_ms / own.later_steps / forward_ms,
        "forward_ratio": own.forward_ms / own.later_steps / forward_ms,
        "plain_forward_ms": forward_ms,
        "plain_tokens_per_s": plain.tokens / plain.seconds,
    }


def measure_all(arms: list[Arm], options: argparse.Namespace, console: Console) -> int:
    """Measures the rows that are missing, and returns the number of texts that differ."""
    cells = [
        Cell(arm, tree, batch, temperature)
        for batch in options.batches
        for temperature in options.temperatures
        for arm in arms
        for tree in options.trees
    ]
    path = options.work / ROWS
    measured = {(r["arm"], r["tree"], r["batch"], r["temperature"]): r for r in read_rows(path)}
    given = {name: getattr(options, name) for name in SHARED}
    facts = {"target_sha256": target_sha256(options.target), "options": given}
    # The first prompt only warms up.
    prompts = passages(TextTokenizer.open(options.target), options.prompts + 1, options.length)
    differ = 0
    for number, cell in enumerate(cells, start=1):
        if cell.key in measured:
            check_facts(f"a row of {path}", measured[cell.key], facts)
            continue
        row = {"arm": cell.arm.name, "drafter": cell.arm.drafter, "tree": cell.tree}
        row |= {"batch": cell.batch, "temperature": cell.temperature, "machine": machine()}
        row |= facts | measure(cell, prompts, options)
        append_row(path, row)
        found = row["figures"]
        differ += found["differ"]
        console.print(
            f"{number}/{len(cells)} {' '.join(map(str, cell.key))}: "
            f"{found['tokens_per_step']:.2f} tokens per step, "
            f"{found['ratio']:.2f} of plain, draft {found['draft_share']:.0%} of a forward",
            soft_wrap=True,
        )
    return differ


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file, sorted by name. A line that was not finished is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return sorted(rows, key=lambda r: f"{r['arm']}_{r['tree']}_batch{r['batch']}")


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Adds a line to a file of rows, after the last whole line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        text = json.dumps(row, default=float).replace("NaN", "null")
        file.write(text.encode() + b"\n")


def chosen(names: list[str] | None, known: list[str], flag: str) -> list[str]:
    """Returns the known names, or those of them that the flag names."""
    if unknown := sorted(set(names or ()) - set(known)):
        raise SystemExit(f"{flag} names {unknown}; choose from {known}")
    return [name for name in known if names is None or name in names]


def tree_setting(text: str) -> str:
    kind, dash, number = text.partition("-")
    numbered = kind in ("tree", "chain") and number.isdecimal()
    if not (numbered if dash else kind in ("tree", "chain", "static")):
        raise argparse.ArgumentTypeError(f"{text!r}: choose tree, tree-N, chain, chain-N or static")
    return text


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder of trained drafters and rows")
    add("--target", type=Path, help="folder of the target model")
    add("--text", type=Path, action="append", help="folder of `train distill`; repeatable")
    add("--minutes", type=float, default=15.0, help="training time of each kind")
    add("--kinds", nargs="+", help=f"train only these, from {', '.join(TRAINERS)}")
    add("--arms", nargs="+", help="measure only these drafters")
    add("--trees", nargs="+", type=tree_setting, default=["chain-4", "tree-4", "tree-16", "tree"])
    add("--batches", nargs="+", type=int, default=[1, 8, 32], help="texts at once")
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    add("--prompts", type=int, default=64, help="texts of each row")
    add("--length", type=int, default=64, help="tokens of a prompt")
    add("--tokens", type=int, default=64, help="tokens to write per prompt")
    add("--seed", type=int, default=0, help="seed of the trainings")
    add("--threads", type=int, default=2, help="torch threads")
    add("--clock", choices=CLOCKS, default="wall", help="cpu: with --threads 1")
    add("--table", action="store_true", help="only print the tables of the measured rows")
    add("--plot", type=Path, help="path of a plot of the measured rows, .svg or .png")
    options = parser.parse_args(given)
    if not options.table and (options.target is None or not options.text):
        parser.error("--target and --text are needed, except with --table")
    if options.prompts < TURNS * max(options.batches):
        parser.error(f"--prompts needs at least {TURNS} times the largest of --batches")
    return options


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    failed, differ = [], 0
    if not options.table:
        torch.set_num_threads(options.threads)
        verifiers()[SampleChains.name] = SampleChains()
        console = Console(stderr=True)
        kinds = chosen(options.kinds, list(TRAINERS), "--kinds")
        failed = train_all(kinds, options, console)
        arms = arms_of(kinds, options)
        names = chosen(options.arms, [arm.name for arm in arms], "--arms")
        differ = measure_all([arm for arm in arms if arm.name in names], options, console)
        if differ:
            console.print(f"[red]{differ} texts differ from plain decoding[/red]")
    rows = read_rows(options.work / ROWS)
    if not rows:
        raise SystemExit(f"{options.work} has no measured rows")
    print_tables(rows)
    if options.plot:
        save_plot(rows, options.plot)
    return int(bool(failed or differ))


if __name__ == "__main__":
    sys.exit(main())
