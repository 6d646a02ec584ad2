"""Measures text throughput of this engine, transformers and llama.cpp on the same weights.

    python -m benchmarks.text.throughput --quick               # under two minutes on two free cores
    python -m benchmarks.text.throughput --repeats 7 --json F.json

Decoding is greedy, and every run has its own prompt, so that prefix caches do not help. The model
is a random Llama of 1024 x 16 with 32,000 tokens, in which no two matrices are equal. The methods
take turns. The "oracle" drafts 5 tokens that match the text 100 % or 70 % of the time, and
transformers' assisted generation gets the same drafts. llama.cpp, if installed, decodes plainly
with the weights as they are, and with bfloat16 weights also in F16. With --int8, this engine and
llama.cpp (Q8_0) also decode plainly with the same weights in 8 bits.
The prompt contains half of the text, so that prompt lookup can find it.

Prints a table per dtype with tokens/s and ratios. Prefill is the time to the first commit; decode
is the rest, with its tokens. The run fails if texts differ in fp32, or if drafts change a text of
this engine in any dtype.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.baselines.llama import language_llama
from benchmarks.support.baselines.llama_cpp import missing
from benchmarks.support.baselines.oracle import Oracle
from benchmarks.support.report import Report
from benchmarks.support.runs import CLOCKS
from benchmarks.text.text_runs import Written, figures
from benchmarks.text.throughput_methods import (
    AGREEMENTS,
    BESIDE,
    DRAFTED,
    INT8,
    LLAMA_CPP,
    OURS,
    THEIRS,
    Ours,
    PlainCpp,
    Theirs,
)
from recserve.models.language_model import LanguageModel
from recserve.models.packing import pack_weights
from tests.support.walking_model import drawn_language_model, walk

CONCURRENT = 8


def prompt_for(model: LanguageModel, length: int, tokens: int, seed: int) -> list[int]:
    """Returns a prompt of noise, half of the future text, noise, and the token that starts the
    text.

    The drawn model writes the next number of a walk through its vocabulary (drawn.py).
    """
    random, size = np.random.default_rng(seed), model.config.vocab_size
    known = [int(random.integers(size))]
    while len(known) < 4 + tokens // 2:
        known.append(walk(known[-1], size))
    noise = random.integers(0, size, length).tolist()
    return [*noise[: max(length - len(known) - 12, 0)], *known, *noise[:8], *known[:4]]


class Bench:
    """All methods on one set of weights; `same` is True while all texts agree as required."""

    def __init__(self, model: LanguageModel, options: argparse.Namespace, console: Console) -> None:
        self.model, self.options, self.console = model, options, console
        self.half = model.tokens.weight.dtype != torch.float32
        self.oracles = {
            n: Oracle(a, DRAFTED, model.config.vocab_size) for n, a in AGREEMENTS.items()
        }
        self.others: dict[str, Theirs | PlainCpp] = {}
        if options.only != "ours":
            theirs = Theirs(language_llama(model), self.oracles, options.clock)
            self.others = dict.fromkeys(THEIRS, theirs)
        for name, stored in self._llama_cpp_types():
            positions = options.prompt + options.tokens
            self.others[name] = PlainCpp(model, stored, positions, options.threads, options.clock)
        self.int8: Ours | None = None
        if options.int8:
            rounded = copy.deepcopy(model)
            pack_weights(rounded, "int8")
            self.int8 = Ours(rounded, {}, options.clock, options.invariant)
        pack_weights(model)
        self.ours = Ours(model, self.oracles, options.clock, options.invariant)
        self.same = True

    def _llama_cpp_types(self) -> list[tuple[str, str | None]]:
        """Returns the methods of LLAMA_CPP that run, with the type of their weights."""
        if self.options.only == "ours" or missing():
            return []
        wanted = {None: True, "F16": self.half, "Q8_0": self.options.int8}
        return [(name, stored) for name, stored in LLAMA_CPP.items() if wanted[stored]]

    def runs(self) -> dict[str, list[Written]]:
        """Returns the runs of each method without the first, which is a warm-up."""
        runs: dict[str, list[Written]] = {}
        for number in range(self.options.repeats + 1):
            for name, written in self._turns(number).items():
                runs.setdefault(name, []).append(written)
        return {name: own[1:] for name, own in runs.items()}

    def _turns(self, number: int) -> dict[str, Written]:
        """Runs each method once, on prompts of this turn."""
        tokens = self.options.tokens
        seeds = [100 * number + i for i in range(CONCURRENT)]
        prompts = [prompt_for(self.model, self.options.prompt, tokens, seed) for seed in seeds]
        alone = prompts[:1]
        done = {"plain": self.ours.write(alone, "none", tokens)}
        truth = done["plain"].texts[0]
        for oracle in self.oracles.values():
            oracle.texts = [alone[0] + truth]
        for name in (*AGREEMENTS, "ngram"):
            done[name] = self.ours.write(alone, name, tokens)
        done["together"] = self.ours.write(prompts, "none", tokens)
        self.same &= all(written.texts[0] == truth for written in done.values())
        if self.int8 is not None:
            done["int8"] = self.int8.write(alone, "none", tokens)
            done["int8 together"] = self.int8.write(prompts, "none", tokens)
        for name, other in self.others.items():
            done[name] = other.write(alone, name, tokens)
            if done[name].texts[0] != truth:
                self.console.print(f"  {name}: run {number} writes another text")
                self.same &= self.half or LLAMA_CPP.get(name) is not None
        return done


def print_figures(console: Console, title: str, found: dict[str, dict[str, float]]) -> None:
    """Prints one row per method."""
    table = Table(title=title, title_justify="left")
    columns = ("tokens/s", "decode tokens/s", "prefill ms", "tokens per step")
    for column in ("method", *columns, "outside the network", "beside", "ratio", "decode ratio"):
        table.add_column(column, justify="left" if column in ("method", "beside") else "right")
    for name in (*OURS, *INT8, *THEIRS, *LLAMA_CPP):
        if name not in found:
            continue
        f = found[name]
        ratios = [f.get(f"{field}_ratio") for field in ("tokens_per_s", "decode_tokens_per_s")]
        table.add_row(
            name,
            f"{f['tokens_per_s']:.1f}",
            f"{f['decode_tokens_per_s']:.1f}",
            f"{f['prefill_ms']:.0f}",
            f"{f['tokens_per_step']:.2f}",
            "-" if np.isnan(f["overhead"]) else f"{f['overhead']:.1%}",
            BESIDE.get(name, "") if ratios[0] else "",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    if missing():
        table.add_row("llama.cpp", f"not installed: {', '.join(missing())}")
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run two repeats of 24 tokens")
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16", "float32"], help="dtypes of the weights"
    )
    parser.add_argument("--model", default="1024x16", help="hidden size x layers")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="size of the vocabulary")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens written per request")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs per method")
    parser.add_argument("--only", choices=["ours"], help="leave out transformers and llama.cpp")
    parser.add_argument("--invariant", action="store_true", help="the engine's invariant mode")
    parser.add_argument("--int8", action="store_true", help="add 8-bit weights")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with --threads 1")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.tokens = 2, 24
    return options


def main() -> int:
    options = arguments()
    report = Report(options)
    hidden, layers = (int(part) for part in options.model.split("x"))
    all_same = True
    for name in options.dtypes:
        dtype = getattr(torch, name)
        model = drawn_language_model(hidden, layers, options.vocabulary, dtype)
        weights = sum(w.numel() for w in model.parameters())
        began = time.perf_counter()
        bench = Bench(model, options, report.console)
        runs = bench.runs()
        all_same &= bench.same
        found = figures(runs, BESIDE)
        title = (
            f"{options.model} · {weights / 1e6:.0f} M weights · {name} · prompt {options.prompt} · "
            f"{options.tokens} tokens · {time.perf_counter() - began:.0f} s"
        )
        print_figures(report.console, title, found)
        cell = {"dtype": name, "weights": weights, "prompt": options.prompt}
        cell |= {"tokens": options.tokens, "repeats": options.repeats, "figures": found}
        cell |= {"runs": {n: [asdict(run) for run in own] for n, own in runs.items()}}
        report.add([cell])
    if not all_same:
        report.console.print("[red]texts differ that must be the same[/red]")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
