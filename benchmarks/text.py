"""Text: this engine beside transformers and llama.cpp, same drawn weights, the methods in turns.

    python benchmarks/text.py --quick               # under two minutes on two free cores
    python benchmarks/text.py --repeats 7 --json F.json

Greedy, a prompt of its own for every run (a cache of prefixes finds nothing), a drawn Llama of
1024 x 16 and 32,000 tokens in which no two matrices are equal. The "oracle" drafts 5 tokens that
agree with the text 100 % or 70 % of the time, and transformers' assisted generation gets the same
drafts; llama.cpp, where its package is installed, decodes plainly. Half of what is to be written
stands in the prompt, for prompt lookup to find. Prefill is the time to the first commit, decode the
rest and the tokens it adds. The run fails where texts differ in fp32, and where drafts change a
text of this engine in any type.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines.llama import Network, language_llama
from baselines.llama_cpp import LlamaCpp, missing, write_gguf
from baselines.oracle import Oracle, OracleCandidates, OracleDrafter
from drawn import drawn_language_model, walk
from measuring import CLOCKS, machine, silence_transformers, write_json
from rich.console import Console
from rich.table import Table
from transformers import StoppingCriteria

from recserve.core.text_request import SamplingParams, Speculation, TextCommit, TextRequest
from recserve.draft.ngram import NgramDrafter
from recserve.engine.engine import Engine, EngineConfig
from recserve.models.language_model import LanguageModel
from recserve.models.packing import pack_weights

DRAFTED = 5
CONCURRENT = 8
AGREEMENTS = {"oracle-100": 1.0, "oracle-70": 0.7}
OURS = ("plain", *AGREEMENTS, "ngram", "together")
THEIRS = ("transformers", "assisted-100", "assisted-70", "lookup")
LLAMA_CPP = "llama.cpp"
BESIDE = {
    "plain": "transformers",
    "oracle-100": "assisted-100",
    "oracle-70": "assisted-70",
    "ngram": "lookup",
    "together": "plain",
    LLAMA_CPP: "plain",
}


@dataclass(frozen=True)
class Written:
    """One run. texts: of each request. prefill_s: to the first commit, which gave `first` tokens of
    each; seconds: all of it. network_s: inside the network and its head, from the first commit on;
    nan where not measured.
    """

    texts: list[list[int]]
    seconds: float
    prefill_s: float
    first: int
    steps: int
    network_s: float = float("nan")

    @property
    def tokens_per_s(self) -> float:
        """With prefill."""
        return sum(map(len, self.texts)) / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Without prefill and the tokens it gave."""
        return sum(len(t) - self.first for t in self.texts) / (self.seconds - self.prefill_s)

    @property
    def overhead(self) -> float:
        """Share of the decode steps that is spent outside the network."""
        return 1 - self.network_s / (self.seconds - self.prefill_s)


class Ours:
    """The engine with its drafters, and a stopwatch around the network."""

    def __init__(
        self, model: LanguageModel, oracles: dict[str, Oracle], clock: str, invariant: bool = False
    ) -> None:
        drafters = {name: OracleDrafter(oracle) for name, oracle in oracles.items()}
        slot = 2 * model.config.decoder.num_layers * model.config.decoder.num_kv_heads
        slot *= model.config.decoder.head_dim * model.tokens.weight.dtype.itemsize
        self.engine = Engine(
            config=EngineConfig(kv_bytes=slot * 8192, invariant=invariant),
            text=model,
            drafters={**drafters, "ngram": NgramDrafter()},
        )
        self.now, self.network_s = CLOCKS[clock], 0.0
        lane: Any = self.engine._lanes["text"]
        runner = lane.runner
        runner.trunk.hidden = self._timed(runner.trunk.hidden)
        model.logits = self._timed(model.logits)  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = self.now()
            result = call(*arguments)
            self.network_s += self.now() - began
            return result

        return timed

    def write(self, prompts: list[list[int]], drafter: str, tokens: int) -> Written:
        """All prompts at once."""
        self.engine.forget_all()
        first: list[tuple[float, float, int]] = []

        def listen(news: TextCommit) -> bool:
            first.append((self.now(), self.network_s, len(news.tokens)))
            return False

        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        requests = [
            TextRequest(np.array(p), params, Speculation(drafter), on_commit=listen)
            for p in prompts
        ]
        began, steps = self.now(), 0
        futures = [self.engine.submit(request) for request in requests]
        with torch.inference_mode():  # as the engine's own thread
            while self.engine.step():
                steps += 1
        ended = self.now()
        answers = [future.result(0) for future in futures]
        return Written(
            [a.tokens.tolist() for a in answers],
            ended - began,
            first[0][0] - began,
            first[0][2],
            max(a.timing.forwards for a in answers),
            self.network_s - first[0][1],
        )


class _Clock(StoppingCriteria):
    """Notes when each step of transformers ended, and how long the text was then."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.times, self.lengths = now, list[float](), list[int]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(self.now())
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Theirs:
    """transformers' generate on the same weights."""

    def __init__(self, model: Network, oracles: dict[str, Oracle], clock: str) -> None:
        self.model, self.oracles, self.now = model, oracles, CLOCKS[clock]
        self.stock = model._get_candidate_generator

    @torch.inference_mode()
    def write(self, prompts: list[list[int]], method: str, tokens: int) -> Written:
        """One prompt, by a method of THEIRS."""
        prompt = torch.tensor(prompts)
        length, options = prompt.shape[1] + tokens, dict[str, Any]()
        if method != "transformers":
            options["prompt_lookup_num_tokens"] = DRAFTED
        self.model._get_candidate_generator = self.stock
        if method.startswith("assisted"):
            # What generate would ask the assistant model for.
            oracle = self.oracles[method.replace("assisted", "oracle")]
            candidates = OracleCandidates(oracle, length)
            self.model._get_candidate_generator = lambda **_: candidates
        clock = _Clock(self.now)
        began = self.now()
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=tokens,
            stopping_criteria=[clock],
            **options,
        )
        ended = self.now()
        text = out[0, prompt.shape[1] :].tolist()
        first = clock.lengths[0] - prompt.shape[1]
        return Written([text], ended - began, clock.times[0] - began, first, len(clock.times))


def open_llama_cpp(model: LanguageModel, options: argparse.Namespace) -> LlamaCpp:
    """The same weights, read from a file that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(model, path)
        positions = options.prompt + options.tokens
        return LlamaCpp(path, positions, options.threads, model.tokens.weight.dtype)


def prompt_for(model: LanguageModel, length: int, tokens: int, seed: int) -> list[int]:
    """Noise, what half of the text will be, noise, and where the text begins.

    The drawn model writes the next number of a walk through its vocabulary (drawn.py).
    """
    random, size = np.random.default_rng(seed), model.config.vocab_size
    known = [int(random.integers(size))]
    while len(known) < 4 + tokens // 2:
        known.append(walk(known[-1], size))
    noise = random.integers(0, size, length).tolist()
    return [*noise[: max(length - len(known) - 12, 0)], *known, *noise[:8], *known[:4]]


def run_type(
    model: LanguageModel, options: argparse.Namespace, console: Console
) -> tuple[dict[str, list[Written]], bool]:
    """Every method's runs; whether the texts agree as they must."""
    oracles = {n: Oracle(a, DRAFTED, model.config.vocab_size) for n, a in AGREEMENTS.items()}
    theirs: Theirs | None = None
    if options.only != "ours":
        theirs = Theirs(language_llama(model), oracles, options.clock)
    llama_cpp = None if options.only == "ours" or missing() else open_llama_cpp(model, options)
    pack_weights(model)
    ours = Ours(model, oracles, options.clock, options.invariant)
    runs: dict[str, list[Written]] = {}
    same = True
    for number in range(options.repeats + 1):
        seeds = [100 * number + i for i in range(CONCURRENT)]
        prompts = [prompt_for(model, options.prompt, options.tokens, seed) for seed in seeds]
        alone = prompts[:1]
        done = {"plain": ours.write(alone, "none", options.tokens)}
        truth = done["plain"].texts[0]
        for oracle in oracles.values():
            oracle.texts = [alone[0] + truth]
        for name in (*AGREEMENTS, "ngram"):
            done[name] = ours.write(alone, name, options.tokens)
            same &= done[name].texts[0] == truth
        done["together"] = ours.write(prompts, "none", options.tokens)
        same &= done["together"].texts[0] == truth
        for name in THEIRS if theirs is not None else ():
            assert theirs is not None
            done[name] = theirs.write(alone, name, options.tokens)
        if llama_cpp is not None:
            began = CLOCKS[options.clock]()
            written, times = llama_cpp.write(alone[0], options.tokens, CLOCKS[options.clock])
            done[LLAMA_CPP] = Written(
                texts=[written],
                seconds=times[-1] - began,
                prefill_s=times[0] - began,
                first=1,
                steps=len(times),
            )
        for name in (*THEIRS, LLAMA_CPP):
            if name in done and done[name].texts[0] != truth:
                console.print(f"  {name}: run {number} writes another text")
                same &= model.tokens.weight.dtype != torch.float32
        if number:  # the first is to warm up
            for name, written in done.items():
                runs.setdefault(name, []).append(written)
    return runs, same


def middle(runs: list[Written], of: Callable[[Written], float]) -> float:
    """Median."""
    return float(np.median([of(run) for run in runs]))


def figures(runs: dict[str, list[Written]]) -> dict[str, dict[str, float]]:
    """Medians of each method, and of the ratios to its peer run by run."""
    out: dict[str, dict[str, float]] = {}
    for name, own in runs.items():
        peer = runs.get(BESIDE.get(name, "none"))
        out[name] = {
            "tokens_per_s": middle(own, lambda r: r.tokens_per_s),
            "decode_tokens_per_s": middle(own, lambda r: r.decode_tokens_per_s),
            "prefill_ms": 1e3 * middle(own, lambda r: r.prefill_s),
            "tokens_per_step": middle(own, lambda r: len(r.texts[0]) / r.steps),
            "overhead": middle(own, lambda r: r.overhead),
        }
        if peer is not None:
            pairs = list(zip(own, peer, strict=True))
            for field in ("tokens_per_s", "decode_tokens_per_s"):
                ratios = [getattr(a, field) / getattr(b, field) for a, b in pairs]
                out[name][f"{field}_ratio"] = float(np.median(ratios))
    return out


def print_figures(console: Console, title: str, found: dict[str, dict[str, float]]) -> None:
    """Methods down."""
    table = Table(title=title, title_justify="left")
    columns = ("tokens/s", "decode tokens/s", "prefill ms", "tokens per step")
    for column in ("method", *columns, "outside the network", "beside", "ratio", "decode ratio"):
        table.add_column(column, justify="left" if column in ("method", "beside") else "right")
    for name in (*OURS, *THEIRS, LLAMA_CPP):
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
    if LLAMA_CPP not in found and missing():
        table.add_row(LLAMA_CPP, f"not installed: {', '.join(missing())}")
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two repeats of 24 tokens")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--model", default="1024x16", help="hidden x layers")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens written per request")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["ours"], help="leave the others out")
    parser.add_argument("--invariant", action="store_true", help="the engine's invariant mode")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with --threads 1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.tokens = 2, 24
    return options


def main() -> int:
    options = arguments()
    silence_transformers()
    torch.set_num_threads(options.threads)
    hidden, layers = (int(part) for part in options.model.split("x"))
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts = machine() | {"clock": options.clock, "repeats": options.repeats}
    content: dict[str, Any] = {"machine": facts, "cells": []}
    console.print(facts)
    all_same = True
    for name in options.dtypes:
        dtype = getattr(torch, name)
        model = drawn_language_model(hidden, layers, options.vocabulary, dtype)
        weights = sum(w.numel() for w in model.parameters())
        began = time.perf_counter()
        runs, same = run_type(model, options, console)
        all_same &= same
        found = figures(runs)
        title = (
            f"{options.model} · {weights / 1e6:.0f} M weights · {name} · prompt {options.prompt} · "
            f"{options.tokens} tokens · {time.perf_counter() - began:.0f} s"
        )
        print_figures(console, title, found)
        content["cells"].append(
            {"dtype": name, "weights": weights, "prompt": options.prompt, "tokens": options.tokens}
            | {"figures": found, "runs": {n: [asdict(r) for r in rs] for n, rs in runs.items()}}
        )
        if options.json:
            write_json(options.json, content)
    if not all_same:
        console.print("[red]texts differ that must be the same[/red]")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
