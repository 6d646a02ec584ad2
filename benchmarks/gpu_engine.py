"""The engine on a device: the same answers as on the CPU from every strategy, and its times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from drawn import Catalogue, drawn_catalogue, drawn_ranker, drawn_ranking_root, drawn_recommender
from gpu_checks import Check, checked

from recserve.core.request import LikelihoodRequest, RankRequest, RecommendRequest, Root
from recserve.engine.engine import Engine, EngineConfig
from recserve.engine.heads import Heads
from recserve.kernels.trie import build_trie
from recserve.models.drafters.nezha import SelfDraftConfig, SelfDraftHead
from recserve.models.inputs import NodeInputs
from recserve.models.ranker import Ranker
from recserve.models.recommender import Recommender


def small_catalogue(items: int = 150) -> Catalogue:
    """A few items, no data read."""
    g = torch.Generator().manual_seed(1)
    codes = torch.unique(torch.randint(0, 6, (items, 4), generator=g), dim=0)
    return Catalogue("small", codes, build_trie(codes, (6,) * 4))


def recommender_engine(model: Recommender, kv_bytes: int) -> Engine:
    """With heads started from the target, so that every strategy is there that needs no index."""
    weight = model.tokens.weight
    config = SelfDraftConfig(model.config.decoder.hidden_size, model.config.codebook_sizes)
    heads = []
    for form in (config, replace(config, placeholders=True)):
        torch.manual_seed(0)
        head = SelfDraftHead(form)
        head.start_from(model)
        heads.append(head.to(weight.device, weight.dtype).eval())
    return Engine(model, config=EngineConfig(kv_bytes=kv_bytes), heads=Heads(*heads))


def recommend_root(model: Recommender, events: int, seed: int) -> Root:
    """BOS and a drawn history, on the model's device."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, model.num_bound_items, (events,), generator=g)
    device = model.tokens.weight.device
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), model.item_tokens.cpu()[rows].flatten()])
    return Root(NodeInputs(tokens.to(device)), tokens.numpy())


def candidates(ranker: Ranker, count: int, seed: int) -> NodeInputs:
    """Drawn candidates on the CPU."""
    g = torch.Generator().manual_seed(seed)
    c = ranker.config
    return NodeInputs(
        torch.randint(0, c.num_items, (count,), generator=g),
        torch.full((count,), 3),
        torch.randint(0, c.num_types, (count,), generator=g),
        torch.arange(count),
        torch.randn(count, c.dense_size, generator=g),
    )


def on_device(inputs: NodeInputs, device: str) -> NodeInputs:
    """The same rows elsewhere."""
    return replace(
        inputs, **{k: v.to(device) for k, v in vars(inputs).items() if isinstance(v, torch.Tensor)}
    )


def engine_checks(device: str) -> Iterator[Check]:
    """Slates, likelihoods and rankings of the device against those of the CPU, in float32."""
    catalogue = small_catalogue()
    answers: dict[str, dict[str, Any]] = {}

    def answer(strategy: str, where: str) -> Any:
        if where not in answers:
            # A model of its own for each device: modules move in place.
            model = _cpu_model(catalogue).to(where)
            model.bind_items(catalogue.codes)
            answers[where] = {"engine": recommender_engine(model, 2**24), "model": model}
        engine, model = answers[where]["engine"], answers[where]["model"]
        trie = catalogue.trie.to(where)
        roots = [recommend_root(model, n, n) for n in (1, 9, 40)]
        if strategy == "likelihood":
            rows = np.arange(trie.num_items)
            found = engine.run_many([LikelihoodRequest(root, trie, rows) for root in roots])
            return [(rows, scores.values[:, 0]) for scores in found]
        gone = np.arange(20)
        asked = [RecommendRequest(r, trie, 10, 20, strategy, excluded=gone) for r in roots]
        return [(slate.rows, slate.scores) for slate in engine.run_many(asked)]

    def difference(strategy: str, compared: str, where: str) -> float:
        worst = 0.0
        pairs = zip(answer(strategy, device), answer(compared, where), strict=True)
        for (rows, scores), (expected_rows, expected) in pairs:
            if (rows != expected_rows).mean() > 0.1:
                return float("inf")
            worst = max(worst, float(np.abs(scores - expected).max()))
        return worst

    names = [*recommender_engine(_cpu_model(catalogue), 2**24).strategies, "likelihood"]
    for name in names:
        yield checked(
            f"strategy {name}: as on the CPU", lambda n=name: difference(n, n, "cpu"), 2e-3
        )
    if "speculative" in names:
        yield checked(
            "strategy speculative: as beam on this device",
            lambda: difference("speculative", "beam", device),
            1e-4,
        )
    yield checked("strategy rank: as on the CPU", lambda: ranking_difference(device), 2e-3)


def _cpu_model(catalogue: Catalogue) -> Recommender:
    return drawn_recommender(catalogue, 64, 2, "children", torch.float32, level_heads=True)


def ranking_difference(device: str) -> float:
    """Largest difference of task logits over 300 candidates, with and without time limits."""
    scores: dict[str, list[np.ndarray]] = {}
    for where in ("cpu", device):
        ranker = drawn_ranker(500, 64, 2).to(where)
        ranker.freeze_items()
        engine = Engine(ranker=ranker, config=EngineConfig(kv_bytes=2**24))
        root = drawn_ranking_root(ranker, 60, 0)
        limits = np.random.default_rng(0).integers(root.shared, 61, 300)
        root = replace(root, inputs=on_device(root.inputs, where))
        asked = on_device(candidates(ranker, 300, 1), where)
        requests = [RankRequest(root, asked, limit) for limit in (None, limits)]
        scores[where] = [answer.values for answer in engine.run_many(requests)]
    pairs = zip(scores["cpu"], scores[device], strict=True)
    return max(float(np.abs(one - two).max()) for one, two in pairs)


def engine_rows(device: str, smoke: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Milliseconds of whole requests, cold and warm, strategies and batches; then rankings."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    catalogue = small_catalogue() if smoke else drawn_catalogue(12_101)
    for hidden, layers in ((64, 1),) if smoke else ((256, 4), (1024, 12)):
        model = drawn_recommender(catalogue, hidden, layers, "children", dtype, level_heads=True)
        model = model.to(device)
        model.bind_items(catalogue.codes)
        engine, trie = (
            recommender_engine(model, 2**24 if smoke else 2**33),
            catalogue.trie.to(device),
        )
        for strategy in engine.strategies:
            for batch, width in ((1, 10),) if smoke else ((1, 50), (8, 50), (64, 50), (1, 256)):
                if time.monotonic() > deadline:
                    return
                times = {}
                for state, seeds in (("cold", range(1, 6)), ("warm", [5] * 10)):
                    taken = []
                    for seed in seeds:
                        roots = [recommend_root(model, 50, 1000 * seed + i) for i in range(batch)]
                        asked = [RecommendRequest(r, trie, 10, width, strategy) for r in roots]
                        began = time.perf_counter()
                        engine.run_many(asked)
                        taken.append((time.perf_counter() - began) * 1e3)
                    times[f"{state}_ms"] = float(np.median(taken[1:]))
                name = f"recommend {hidden}x{layers} {strategy} batch {batch} beam {width}"
                yield {"engine": name, "dtype": str(dtype)[6:], **times}
    ranker = drawn_ranker(500 if smoke else 12_101, 64 if smoke else 512, 1 if smoke else 3)
    ranker = ranker.to(device)
    ranker.freeze_items()
    engine = Engine(ranker=ranker, config=EngineConfig(kv_bytes=2**24 if smoke else 2**31))
    for count in (40,) if smoke else (500, 4000):
        root = drawn_ranking_root(ranker, 40 if smoke else 1000, 0)
        root = replace(root, inputs=on_device(root.inputs, device))
        asked = on_device(candidates(ranker, count, 1), device)
        taken = []
        for _ in range(12):
            began = time.perf_counter()
            engine.run(RankRequest(root, asked))
            taken.append((time.perf_counter() - began) * 1e3)
        yield {"engine": f"rank {count} candidates, warm", "warm_ms": float(np.median(taken[2:]))}
