"""Measures speculative decoding of an 8B-shaped model by tree size, batch and acceptance.

    python -m benchmarks.gpu.drafts --json drafts.json              # on a GPU with 60 GiB
    python -m benchmarks.gpu.drafts --device cpu --smoke            # its logic, tiny, anywhere

The target has drawn weights and writes a walk through its vocabulary, so its next tokens are known.
A synthetic drafter proposes the right token with a given rate at every level. Its tree is the best
one for this rate, so the figures show what a drafter with this acceptance is worth. Prompts come
from the prefix cache, and only decode steps are measured. The run fails if a text is not the walk.

Networks of drafters, also with drawn weights, are measured beside a synthetic drafter with as many
nodes that is never right. The difference is the time that they draft.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.support.timing import machine
from recserve.drafters.eagle.drafter import EagleDrafter
from recserve.drafters.eagle.network import Eagle, EagleConfig
from recserve.drafters.medusa.drafter import MedusaDrafter
from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.drafters.shared.rank_tree import RankTree, best_tree
from recserve.drafters.specformer.drafter import SpecformerDrafter
from recserve.drafters.specformer.network import Specformer, SpecformerConfig
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.config import DecoderConfig
from recserve.models.decoder import FINAL_LAYER
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.speculation.completion import Completion, SpeculationCounts, TextQuery
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, TextContext
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.token_paths import mean_accept_length
from tests.support.walking_model import draw_walk, walk

LARGE = DecoderConfig(4096, 32, 32, 8, 128, 14_336, max_positions=8192, rope_theta=500_000.0)
SMALL = DecoderConfig(64, 2, 4, 2, 16, 128)
LEVELS, RANKS = 16, 10


@dataclass(frozen=True)
class Grid:
    """What is measured.

    Attributes:
        decoder: Shape of the target.
        vocabulary: Its tokens.
        nodes: Nodes of the synthetic trees.
        rates: Shares of levels whose first guess is right.
        batches: Concurrent texts.
        prompt: Tokens of a prompt.
        tokens: Tokens to write per text.
        kv_bytes: Size of the KV cache.
    """

    decoder: DecoderConfig
    vocabulary: int
    nodes: tuple[int, ...]
    rates: tuple[float, ...]
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    kv_bytes: int


FULL = Grid(LARGE, 128_256, (16, 60, 128), (0.6, 0.8), (1, 4, 16, 64), 256, 96, 2**33)
SMOKE = Grid(SMALL, 1500, (16, 60), (0.8,), (1, 2), 12, 24, 2**22)


def accuracies(rate: float) -> list[list[float]]:
    """Returns how often the guess of each level and rank is right: a rank at `rate` of the rest."""
    return [[rate * (1 - rate) ** rank for rank in range(RANKS)] for _ in range(LEVELS)]


class SyntheticDrafter(Drafter):
    """Drafts a static tree; the right token of each level has a drawn rank.

    Args:
        vocabulary: V of the walk.
        rate: How often the first guess of a level is right; 0 means never.
        tree: The tree.
    """

    def __init__(self, vocabulary: int, rate: float, tree: RankTree) -> None:
        self.vocabulary, self.rate, self.tree = vocabulary, rate, tree

    def propose(
        self, contexts: Sequence[TextContext], budgets: Sequence[Budget]
    ) -> list[TextDraft]:
        """Returns one tree per text; ranks depend on the request's seed and the position."""
        return [self._one(c, b) for c, b in zip(contexts, budgets, strict=True)]

    def _one(self, context: TextContext, budget: Budget) -> TextDraft:
        shape = self.tree.within(budget)
        if not shape.paths:
            return empty_draft()
        levels = np.array([len(path) - 1 for path in shape.paths])
        ranks = np.array([path[-1] for path in shape.paths])
        right, token = [], context.tokens[-1]
        for _ in range(shape.depth):
            token = int(walk(token, self.vocabulary))
            right.append(token)
        draws = np.random.default_rng((context.params.seed, len(context.tokens)))
        places = draws.geometric(self.rate, shape.depth) - 1 if self.rate else np.full(LEVELS, -1)
        tokens = np.array(right)[levels]
        wrong = (tokens + 1 + ranks) % self.vocabulary
        tokens = np.where(places[levels] == ranks, tokens, wrong)
        return TextDraft(torch.from_numpy(tokens), torch.tensor(shape.parents()), shape.depth)


def drawn_target(grid: Grid, device: str, dtype: torch.dtype) -> LanguageModel:
    """Returns a target with drawn weights, made on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LanguageModel(LanguageModelConfig(grid.decoder, grid.vocabulary))
    finally:
        torch.set_default_dtype(before)
    draw_walk(model.requires_grad_(False))
    return model.eval()


def networks(target: LanguageModel) -> dict[str, Callable[[], Drafter]]:
    """Returns makers of drafters with drawn networks for a target."""
    decoder, words = target.config.decoder, target.config.vocab_size
    one, depth = replace(decoder, num_layers=1), decoder.num_layers

    def placed(network: nn.Module) -> Any:
        like = target.tokens.weight
        return network.to(like.device, like.dtype).requires_grad_(False).eval()

    def eagle(fused: bool) -> Drafter:
        config = EagleConfig(
            decoder=one,
            target_size=decoder.hidden_size,
            target_layers=(1, depth // 2, depth - 1) if fused else (FINAL_LAYER,),
            vocab_size=words,
            draft_vocab_size=min(words, 32_000) if fused else words,
            fused=fused,
        )
        return EagleDrafter(placed(Eagle(config)), target)

    def specformer() -> Drafter:
        layers = tuple(dict.fromkeys((0, depth // 2, depth - 1, FINAL_LAYER)))
        return SpecformerDrafter(placed(Specformer(SpecformerConfig(one, layers, 8))), target)

    def medusa() -> Drafter:
        heads = placed(MedusaHeads(MedusaConfig(decoder.hidden_size, words, 4)))
        drafter = MedusaDrafter(heads, decoder.hidden_size, words)
        drafter.pack()
        return drafter

    return {
        "medusa": medusa,
        "eagle": lambda: eagle(fused=False),
        "eagle3": lambda: eagle(fused=True),
        "specformer": specformer,
    }


def decoded(
    engine: Engine, drafter: str, nodes: int | None, batch: int, grid: Grid
) -> dict[str, Any]:
    """Returns the figures of a batch of texts whose prompts are cached.

    Raises:
        RuntimeError: If a text is not the walk.
    """
    queries = []
    for seed in range(batch):
        prompt = np.random.default_rng(seed).integers(0, grid.vocabulary, grid.prompt)
        params = SamplingParams(temperature=0.0, max_tokens=grid.tokens, seed=seed)
        queries.append(TextQuery(prompt, params, Speculation(drafter, num_tokens=nodes)))
    # Fills the prefix cache and compiles the kernels.
    first = [replace(query, params=replace(query.params, max_tokens=8)) for query in queries]
    engine.run_many(list[Any](first))
    futures: list[Any] = [engine.submit(query) for query in queries]
    times, running = list[float](), True
    while running:
        began = time.perf_counter()
        running = engine.step()
        times.append((time.perf_counter() - began) * 1e3)
    answers: list[Completion] = [future.result(0) for future in futures]
    counts, written = SpeculationCounts(), 0
    for query, answer in zip(queries, answers, strict=True):
        token = int(query.prompt[-1])
        for found in answer.tokens.tolist():
            token = int(walk(token, grid.vocabulary))
            if found != token:
                raise RuntimeError(f"drafter {drafter}: wrote {found}, the walk has {token}")
        written += len(answer.tokens)
        counts.num_drafts += answer.counts.num_drafts
        counts.num_draft_tokens += answer.counts.num_draft_tokens
        counts.num_accepted_tokens += answer.counts.num_accepted_tokens
        counts.num_draft_levels += answer.counts.num_draft_levels
    steps = sum(answer.timing.forwards for answer in answers)
    return {
        "batch": batch,
        "drafted_per_step": counts.num_draft_tokens / steps,
        "tokens_per_step": written / steps,
        "kappa": counts.kappa,
        # The first step copies cached prefixes, and in the last ones few texts are left.
        "step_ms": float(np.median(times[1:])),
        "tokens_per_s": written / sum(times) * 1e3,
    }


def rows(device: str, grid: Grid) -> Iterator[dict[str, Any]]:
    """Yields one row per drafter and batch."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = drawn_target(grid, device, dtype)
    trees = {
        (nodes, rate): best_tree(accuracies(rate), nodes)
        for nodes in grid.nodes
        for rate in grid.rates
    }
    drafters: dict[str, Drafter] = {
        f"{nodes} nodes, rate {rate}": SyntheticDrafter(grid.vocabulary, rate, tree)
        for (nodes, rate), tree in trees.items()
    }
    expected = {
        f"{nodes} nodes, rate {rate}": 1 + mean_accept_length(tree, accuracies(rate))
        for (nodes, rate), tree in trees.items()
    }
    yield from _of(model, drafters, grid, expected)
    for name, make in networks(model).items():
        drafter = make()
        size = getattr(drafter, "num_nodes", None) or len(drafter.tree)
        beside = SyntheticDrafter(grid.vocabulary, 0.0, best_tree(accuracies(0.5), size))
        yield from _of(model, {name: drafter, f"{size} nodes beside {name}": beside}, grid, {})


def _of(
    model: LanguageModel, drafters: dict[str, Drafter], grid: Grid, expected: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """Yields the rows of plain decoding and of some drafters in one engine."""
    config = EngineConfig(kv_bytes=grid.kv_bytes, load_aware=False)
    engine = build_engine(EngineModels(text=model, drafters=drafters), config)
    for batch in grid.batches:
        plain = 0.0
        for name in ("none", *drafters):
            nodes = max(grid.nodes) if name in expected else None  # None: the drafter's own number
            row = decoded(engine, name, nodes, batch, grid)
            plain = plain or row["tokens_per_s"]
            row = {"drafter": name, **row, "ratio": row["tokens_per_s"] / plain}
            if name in expected:
                row["expected_tokens_per_step"] = expected[name]
            yield row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="use tiny shapes")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu --smoke tries the logic", file=sys.stderr)
        return 2
    content: dict[str, Any] = {"machine": machine(chosen.device), "rows": []}
    for row in rows(chosen.device, SMOKE if chosen.smoke else FULL):
        print(json.dumps(row), flush=True)
        content["rows"].append(row)
        if chosen.json is not None:  # after every row, so that a crash loses nothing
            chosen.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
