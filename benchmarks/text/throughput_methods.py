"""Methods that throughput.py compares: this engine, transformers and llama.cpp."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import StoppingCriteria

from benchmarks.support.baselines.llama import Network
from benchmarks.support.baselines.llama_cpp import LlamaCpp, write_gguf
from benchmarks.support.baselines.oracle import Oracle, OracleCandidates, OracleDrafter
from benchmarks.support.runs import CLOCKS
from benchmarks.text.text_runs import Written
from recserve.drafters.ngram import NgramDrafter
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.language_model import LanguageModel
from recserve.speculation.completion import TextCommit, TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation

DRAFTED = 5
AGREEMENTS = {"oracle-100": 1.0, "oracle-70": 0.7}
OURS = ("plain", *AGREEMENTS, "ngram", "together")
INT8 = ("int8", "int8 together")
THEIRS = ("transformers", "assisted-100", "assisted-70", "lookup")
LLAMA_CPP = {"llama.cpp": None, "llama.cpp F16": "F16", "llama.cpp Q8_0": "Q8_0"}  # stored type
BESIDE = {
    "plain": "transformers",
    "oracle-100": "assisted-100",
    "oracle-70": "assisted-70",
    "ngram": "lookup",
    "together": "plain",
    "int8": "plain",
    "int8 together": "together",
    "llama.cpp": "plain",
    "llama.cpp F16": "plain",
    "llama.cpp Q8_0": "int8",
}


class Ours:
    """The engine with its drafters, and a stopwatch around the network."""

    def __init__(
        self, model: LanguageModel, oracles: dict[str, Oracle], clock: str, invariant: bool = False
    ) -> None:
        drafters = {name: OracleDrafter(oracle) for name, oracle in oracles.items()}
        slot = 2 * model.config.decoder.num_layers * model.config.decoder.num_kv_heads
        slot *= model.config.decoder.head_dim * model.tokens.weight.dtype.itemsize
        self.engine = build_engine(
            EngineModels(text=model, drafters={**drafters, "ngram": NgramDrafter()}),
            EngineConfig(kv_bytes=slot * 8192, invariant=invariant, load_aware=False),
        )
        self.now, self.network_s = CLOCKS[clock], 0.0
        lane: Any = self.engine.schedulers["text"]
        runner = lane.runner
        runner.compute = self._timed(runner.compute)
        model.logits = self._timed(model.logits)  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = self.now()
            result = call(*arguments)
            self.network_s += self.now() - began
            return result

        return timed

    def write(self, prompts: list[list[int]], drafter: str, tokens: int) -> Written:
        """Writes all prompts concurrently."""
        self.engine.forget_all()
        first: list[tuple[float, float, int]] = []

        def listen(news: TextCommit) -> bool:
            first.append((self.now(), self.network_s, len(news.tokens)))
            return False

        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        requests = [
            TextQuery(np.array(p), params, Speculation(drafter), on_commit=listen) for p in prompts
        ]
        began, steps = self.now(), 0
        futures = [self.engine.submit(request) for request in requests]
        with torch.inference_mode():  # the engine's own thread also runs in this mode
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
    """Records when each step of transformers ended, and the length of the text at that time."""

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
        """Writes one prompt by a method of THEIRS."""
        prompt = torch.tensor(prompts)
        length, options = prompt.shape[1] + tokens, dict[str, Any]()
        if method != "transformers":
            options["prompt_lookup_num_tokens"] = DRAFTED
        self.model._get_candidate_generator = self.stock
        if method.startswith("assisted"):
            # generate takes its candidates from the oracle instead of an assistant model.
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


class PlainCpp:
    """llama.cpp on the same weights, read from a temporary file."""

    def __init__(
        self, model: LanguageModel, stored: str | None, positions: int, threads: int, clock: str
    ) -> None:
        """Writes and loads the weights, stored in this type of GGUF; None is their own type."""
        self.now = CLOCKS[clock]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(model, path, stored=stored)
            self.model = LlamaCpp(path, positions, threads, model.tokens.weight.dtype)

    def write(self, prompts: list[list[int]], method: str, tokens: int) -> Written:
        """Writes one prompt by plain decoding."""
        (prompt,) = prompts
        began = self.now()
        text, times = self.model.write(prompt, tokens, self.now)
        return Written([text], times[-1] - began, times[0] - began, 1, len(times))
