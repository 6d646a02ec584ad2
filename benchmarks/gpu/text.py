"""Checks and times of text steps as CUDA graphs on a device.

The checks compare texts of captured steps (`recorded`) with eager ones (`launched`) and with the
CPU's. On a CPU the same function runs again each time instead of a graph, with the same padding.
`python benchmarks/gpu.py` runs this module and prints one line for each check and measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu.checks import Task, spoil
from benchmarks.support.failures import attempted, complaints, failure, once
from benchmarks.support.timing import Deadline, back_to_back_milliseconds
from recserve.drafters.medusa.drafter import MedusaDrafter
from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.capture import EagerRecorder
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.text_scheduler import TextScheduler
from recserve.engine.text_step_graph import SHAPES, StepShape, TextStepGraphs, TextStepLimits
from recserve.kernels.host import on_device
from recserve.models.language_model import LanguageModel
from recserve.speculation.completion import TextQuery
from recserve.speculation.draft import Budget, TextDraft, chain_draft, empty_draft
from recserve.speculation.drafter import Drafter, TextContext, TextOutcome
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.walking_model import drawn_language_model, walk

VOCABULARY = 1500
PARAMETERS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.5),
    "every parameter": SamplingParams(
        temperature=1.2,
        top_k=50,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={0: 1.5},
        bad_words=((3, 3), (8,)),
        stop_token_ids=(30,),
        min_tokens=6,
    ),
}


class WalkDrafter(Drafter):
    """Drafts trees with the model's known next tokens, each with a wrong sibling."""

    def __init__(self, vocabulary: int, depth: int) -> None:
        self.vocabulary, self.depth = vocabulary, depth

    def propose(
        self, contexts: Sequence[TextContext], budgets: Sequence[Budget]
    ) -> list[TextDraft]:
        """Puts a wrong leaf first on each level, so that the accepted path has to be moved."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            levels = min(self.depth, budget.depth, budget.num_nodes // 2)
            tokens, parents, parent, token = list[int](), list[int](), -1, context.tokens[-1]
            for _ in range(levels):
                token = int(walk(token, self.vocabulary))
                tokens += [(token + 1) % self.vocabulary, token]
                parents += [parent, parent]
                parent = len(tokens) - 1
            draft = TextDraft(torch.tensor(tokens), torch.tensor(parents), levels)
            drafts.append(draft if levels else empty_draft())
        return drafts

    def commit(self, outcomes: Sequence[TextOutcome]) -> None:
        """Does nothing."""

    def forget(self, context_id: int) -> None:
        """Does nothing."""


class DrawnDrafter(Drafter):
    """Drafts chains of sampled tokens; three in four follow the model, the others do not."""

    draws = True

    def __init__(self, vocabulary: int, depth: int, device: torch.device) -> None:
        self.vocabulary, self.depth, self.device = vocabulary, depth, device

    def propose(
        self, contexts: Sequence[TextContext], budgets: Sequence[Budget]
    ) -> list[TextDraft]:
        """Draws tokens that do not depend on the machine, with probabilities on the device."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            right, tokens, token = list[int](), list[int](), context.tokens[-1]
            for level in range(min(self.depth, budget.depth, budget.num_nodes)):
                right.append(int(walk(token, self.vocabulary)))
                number = 2654435761 * (len(context.tokens) + level) + context.params.seed
                token = (right[-1] + ((number >> 7) % 4 == 0)) % self.vocabulary
                tokens.append(token)
            likely = on_device(right, self.device, torch.int64)[:, None]
            probs = torch.zeros(len(tokens), self.vocabulary, device=self.device)
            probs.scatter_(1, likely, 0.75).scatter_(1, (likely + 1) % self.vocabulary, 0.25)
            drafts.append(chain_draft(torch.tensor(tokens, dtype=torch.int64), probs))
        return drafts

    def commit(self, outcomes: Sequence[TextOutcome]) -> None:
        """Does nothing."""

    def forget(self, context_id: int) -> None:
        """Does nothing."""


# Acceptance rules of drafters that do not use `sample`; texts take them in turns.
RULES = {"drawn": ("rejection",), "all rules": ("rejection", "block", "typical", "sample")}


def drawn_heads(model: LanguageModel) -> MedusaDrafter:
    """Returns Medusa heads that guess the next token repeatedly, each with its own noise."""
    torch.manual_seed(0)
    size, vocabulary = model.config.decoder.hidden_size, model.config.vocab_size
    weight = model.tokens.weight
    heads = MedusaHeads(MedusaConfig(size, vocabulary, 3)).to(weight.dtype)
    heads.start_from(model)
    for block in heads.blocks.parameters():
        torch.nn.init.normal_(block, std=0.02)
    drafter = MedusaDrafter(heads.to(weight.device).eval().requires_grad_(False), size, vocabulary)
    drafter.pack()
    return drafter


def shapes_of(*buckets: tuple[int, int]) -> tuple[StepShape, ...]:
    """Returns the step shapes that serving captures for these numbers of nodes and texts."""
    return tuple(shape for shape in SHAPES if (shape.nodes, shape.sequences) in buckets)


# Shapes that these texts need. Each takes seconds to capture if its kernels must be compiled.
CHECKED = shapes_of((2, 1), (16, 1), (16, 8), (40, 32), (72, 8))
MEASURED = CHECKED + shapes_of((264, 32))


def text_engine(
    model: LanguageModel,
    shapes: tuple[StepShape, ...] | None,
    kv_bytes: int,
    more: bool = False,
) -> Engine:
    """Returns an engine with captured steps.

    Args:
        model: The language model.
        shapes: Shapes to capture, as far as possible; None captures none.
        kv_bytes: Size of the KV cache.
        more: True adds a drafter with captured heads, and one that is verified by rejection.
    """
    cuda, vocabulary = model.tokens.weight.is_cuda, model.config.vocab_size
    limits = TextStepLimits(shapes or (), seconds=float("inf"), bytes=2**35)
    recorded = shapes is not None
    config = EngineConfig(
        kv_bytes=kv_bytes, graphs=recorded and cuda, graph_limits=limits, load_aware=False
    )
    drafters: dict[str, Drafter] = {"walk": WalkDrafter(vocabulary, 3)}
    if more:
        drafters["medusa"] = drawn_heads(model)
        drawn = DrawnDrafter(vocabulary, 4, model.tokens.weight.device)
        drafters |= {"drawn": drawn, "all rules": drawn}
    engine = build_engine(EngineModels(text=model, drafters=drafters), config)
    if recorded and not cuda:
        lane: Any = engine.schedulers["text"]
        graphs = TextStepGraphs(lane.runner, lane.kv, model, limits, EagerRecorder(), drafters)
        engine.schedulers["text"] = TextScheduler(
            lane.runner, model, lane.limits, graphs, kv=lane.kv
        )
    return engine


def text_checks(device: str, smoke: bool = False) -> Iterator[Task]:
    """Yields comparisons of captured steps with eager ones and with the CPU's."""
    reasons: list[str] = []

    @once
    def engine(which: str) -> Engine:
        model = drawn_language_model(64, 2, VOCABULARY, torch.float32)
        model = model.to("cpu" if which == "cpu" else device)
        with complaints() as heard:
            made = text_engine(model, CHECKED if which == "recorded" else None, 2**24, more=True)
        reasons.extend(heard)
        lane: Any = made.schedulers["text"]
        spoil(lane.runner)
        return made

    def missing() -> float:
        lost = engine("recorded").stats().unrecorded
        if lost:
            raise RuntimeError(f"{'; '.join(reasons)}; not recorded: {', '.join(lost)}")
        return 0.0

    def write(which: str, name: str, drafter: str, texts: int) -> list[list[int]]:
        rules = RULES.get(drafter, ("sample",))
        requests = [
            TextQuery(
                np.random.default_rng(n).integers(0, VOCABULARY, 5 + 30 * n),
                replace(PARAMETERS[name], seed=n, max_tokens=24),
                Speculation(drafter, rules[n % len(rules)]),
            )
            for n in range(texts)
        ]
        return [answer.tokens.tolist() for answer in engine(which).run_many(requests)]

    def different(name: str, drafter: str, texts: int, against: str) -> float:
        lane: Any = engine("recorded").schedulers["text"]
        before = lane.graphs.counts["replayed"]
        found = write("recorded", name, drafter, texts)
        if lane.graphs.counts["replayed"] == before:
            raise RuntimeError(f"no step was replayed: {lane.graphs.counts}")
        wanted = write(against, name, drafter, texts)
        return float(sum(a != b for a, b in zip(found, wanted, strict=True)))

    yield Task("text steps: all recorded", missing, 0.0)
    cases = (("none", 1), ("walk", 1), ("walk", 8), ("medusa", 2), ("drawn", 1), ("drawn", 8))
    cases += (("all rules", 8),)
    for name in PARAMETERS:
        for drafter, texts in cases:
            brief = smoke and drafter in ("medusa", "drawn", "all rules")
            if brief and (name != "every parameter" or texts > 2 and drafter == "drawn"):
                continue
            for against in ("launched",) if brief else ("launched", "cpu"):
                yield Task(
                    f"recorded steps, {name}, drafter {drafter}, {texts} texts: as {against}",
                    lambda n=name, d=drafter, t=texts, a=against: different(n, d, t, a),
                    0.0,
                )


def text_rows(device: str, smoke: bool, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Yields milliseconds of a decode step, captured and eager.

    For a captured step it also gives the host's share, which is the time outside the device.
    """
    hidden, layers, vocabulary = (64, 1, VOCABULARY) if smoke else (1024, 16, 32_000)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = drawn_language_model(hidden, layers, vocabulary, dtype).to(device)
    for shapes in (MEASURED, None):
        if deadline.passed():
            return
        recorded, began = shapes is not None, time.perf_counter()
        how = "recorded" if recorded else "launched"
        try:
            with complaints() as heard:
                engine = text_engine(model, shapes, 2**24 if smoke else 2**33)
        except Exception as error:
            yield failure(f"text steps, {how}: the engine's start", error)
            continue
        if lost := engine.stats().unrecorded:
            yield failure(f"text steps {', '.join(lost)}: not recorded", "; ".join(heard))
        start_s = time.perf_counter() - began
        cells = product(PARAMETERS, ("none", "walk"), (1,) if smoke else (1, 8, 32))
        for name, drafter, texts in cells:
            if deadline.passed():
                return
            case = f"{hidden}x{layers} {name}, drafter {drafter}, {texts} texts"
            fixed = {"dtype": str(dtype)[6:], "recorded": recorded, "start_s": start_s}
            decode = partial(_decode, engine, name, drafter, texts, vocabulary)
            row = attempted(f"{case}, {how}", decode)
            yield row if "ok" in row else {"text": case, **fixed, **row}


def _note(replays: list[Callable[[], Any]], replay: Callable[[], Any]) -> Any:
    """Runs a replay, and adds it to a list."""
    replays.append(replay)
    return replay()


def _decode(
    engine: Engine, name: str, drafter: str, texts: int, vocabulary: int
) -> dict[str, float]:
    """Returns the median milliseconds of a step.

    For captured steps it adds the share of replayed steps and the microseconds outside the replay.
    """
    lane: Any = engine.schedulers["text"]
    rng = np.random.default_rng(0)
    for n in range(texts):
        params = replace(PARAMETERS[name], seed=n, max_tokens=40, stop_token_ids=(), min_tokens=0)
        engine.submit(TextQuery(rng.integers(0, vocabulary, 200), params, Speculation(drafter)))
    before = dict(lane.graphs.counts) if lane.graphs is not None else {}
    times, replays = [], list[Callable[[], Any]]()
    running = True
    with ExitStack() as wrapped:
        for graph in () if lane.graphs is None else lane.graphs.captured:
            noted = partial(_note, replays, graph.replay)
            wrapped.enter_context(mock.patch.object(graph, "replay", noted))
        while running:
            began = time.perf_counter()
            running = engine.step()
            times.append((time.perf_counter() - began) * 1e3)
    step_ms = float(np.median(times[2:-1]))
    if lane.graphs is None:
        return {"step_ms": step_ms}
    counts = {what: n - before[what] for what, n in lane.graphs.counts.items()}
    share = counts["replayed"] / max(sum(counts.values()), 1)
    if not share:
        return {"step_ms": step_ms, "replayed": 0.0}
    with torch.inference_mode():
        device = str(lane.runner.pool.keys.device.type)
        # The caches keep the data of the last replay, as between steps of serving.
        own_ms = back_to_back_milliseconds(replays[len(replays) // 2], device)
    return {"step_ms": step_ms, "replayed": share, "host_us": (step_ms - own_ms) * 1e3}
