"""Checks and times of the engine on a device, for every strategy, drafter and acceptance rule.

The checks compare results with those of the CPU. `python benchmarks/gpu.py` runs this module and
prints one line for each check and each measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.checks import Task
from benchmarks.support.drawn import (
    Catalogue,
    drawn_catalogue,
    drawn_ranker,
    drawn_ranking_prefix,
    drawn_recommender,
)
from benchmarks.support.failures import attempted, complaints, failure, once
from benchmarks.support.timing import Deadline
from recserve.core.request import Prefix, RankQuery, SlateQuery
from recserve.engine.beam_search_graph import BeamSearchGraphs, SearchLimits, SearchShape
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.capture import (
    CudaRecorder,
    EagerRecorder,
    Recorder,
    is_cuda,
)
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.trie.trie import Trie, build_trie
from recserve.models.inputs import NodeInputs
from recserve.models.item_heads import SelfDraftConfig, SelfDraftHead
from recserve.models.ranker import Ranker
from recserve.models.recommender import Recommender
from recserve.search.strategy import Heads
from tests.support.device_worlds import ranking, recommending, text_engine, text_scores, texts


def small_catalogue(items: int = 150) -> Catalogue:
    """Returns a catalogue of a few random items, which needs no data."""
    g = torch.Generator().manual_seed(1)
    codes = torch.unique(torch.randint(0, 6, (items, 4), generator=g), dim=0)
    return Catalogue("small", codes, build_trie(codes, (6,) * 4))


def recommender_engine(model: Recommender, kv_bytes: int) -> Engine:
    """Returns an engine with untrained heads, so that it has every strategy that needs no index."""
    weight = model.tokens.weight
    config = SelfDraftConfig(model.config.decoder.hidden_size, model.config.codebook_sizes)
    heads = []
    for form in (config, replace(config, placeholders=True)):
        torch.manual_seed(0)
        head = SelfDraftHead(form)
        head.start_from(model)
        heads.append(head.to(weight.device, weight.dtype).eval())
    config = EngineConfig(kv_bytes=kv_bytes, graphs=False)  # `recorded` captures what is wanted
    return build_engine(EngineModels(model, heads=Heads(*heads)), config)


def recorder_for(device: torch.device) -> Recorder:
    """Returns a recorder of CUDA graphs; on a CPU, one that runs the function again each time."""
    return CudaRecorder() if is_cuda(device) else EagerRecorder()


@torch.inference_mode()
def recorded(
    engine: Engine,
    model: Recommender,
    trie: Trie,
    shapes: tuple[SearchShape, ...],
    room: int,
    recorder: Recorder | None = None,
) -> BeamSearchGraphs:
    """Makes an engine replay searches of these shapes; `missing` lists those without a capture.

    `room` is the capacity. `recorder` None captures CUDA graphs, or on a CPU runs the search again
    each time.
    """
    lane: Any = engine.schedulers["recommender"]
    nezha: Any = engine._strategies["nezha"]
    limits = SearchLimits(shapes, room, seconds=float("inf"), bytes=2**35)
    recorder = recorder or recorder_for(model.tokens.weight.device)
    graphs = BeamSearchGraphs(lane.runner, lane.kv, model, nezha.head, limits, recorder)
    lane.searches = graphs
    engine.capture(trie)
    return graphs


def recommend_prefix(model: Recommender, events: int, seed: int) -> Prefix:
    """Returns a BOS token and a random history, on the model's device."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, model.num_bound_items, (events,), generator=g)
    device = model.tokens.weight.device
    codes = model.item_tokens[rows.to(device)].cpu()
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), codes.flatten()])
    return Prefix(NodeInputs(tokens.to(device)), tokens.numpy())


def candidates(ranker: Ranker, count: int, seed: int) -> NodeInputs:
    """Returns random candidates on the CPU."""
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
    """Returns the same rows on another device."""
    return replace(
        inputs, **{k: v.to(device) for k, v in vars(inputs).items() if isinstance(v, torch.Tensor)}
    )


STRATEGIES = ("beam", "speculative", "nezha", "rpg", "dense", "likelihood", "warm")
HOW = {
    "items": ("plain", "filters", "diversity", "weighed", "live"),
    "codes": ("plain", "filters", "live"),
}
DRAFTERS = ("ngram", "suffix", "lookahead", "draft_model", "specinfer", "medusa", "merged")
DRAFTERS += ("specformer",)
RULES = [("draft_model", "rejection"), ("draft_model", "block"), ("specinfer", "multi_step")]
CLOSE = 2e-3  # tolerance between two devices, which add in a different order


def engine_checks(device: str, smoke: bool = False) -> Iterator[Task]:
    """Yields comparisons of all strategies, drafters and rules with the CPU, cold and warm, in
    float32.
    """
    made = once(recommending)
    for form, ways in HOW.items():
        for strategy in STRATEGIES:

            def asked(s: str = strategy, f: str = form, w: Any = ways) -> float:
                h, t = made("cpu", f), made(device, f)
                pairs = [(h.ask(s, how), t.ask(s, how)) for how in (*w, w[0])]
                return max(difference(h.engine, t.engine, *pair) for pair in pairs)

            yield Task(f"strategy {strategy} of {form}: as on the CPU", asked, CLOSE)

        def as_beam(f: str = form) -> float:
            there = made(device, f)
            both = there.ask("beam"), there.ask("speculative")
            return difference(there.engine, there.engine, *both)

        yield Task(f"strategy speculative of {form}: as beam on this device", as_beam, 1e-4)
    yield Task("strategy level_likelihood: as on the CPU", lambda: level_likelihoods(device), CLOSE)
    yield Task("strategy rank: as on the CPU", lambda: rankings(device), CLOSE)
    yield Task("strategy text_scores: as on the CPU", lambda: label_scores(device), CLOSE)
    parameters = ("everything",) if smoke else ("greedy", "everything")
    cases = [(d, "sample", p) for d in ("none", *DRAFTERS) for p in parameters]
    cases += [(drafter, rule, "hot") for drafter, rule in RULES]
    for case in cases:
        name = f"text {', '.join(case)}: as on the CPU"
        yield Task(name, lambda c=case: text_difference(device, *c), 0.0)
    if not smoke:
        yield Task("beam and nezha, 256x4, 12,101 items", lambda: larger(device), CLOSE)


def difference(one: Engine, two: Engine, asked_one: list[Any], asked_two: list[Any]) -> float:
    """Returns the largest difference of scores; infinite if more than one item in ten differs."""
    worst = 0.0
    for a, b in zip(one.run_many(asked_one), two.run_many(asked_two), strict=True):
        if hasattr(a, "rows"):
            if len(a.rows) != len(b.rows) or (a.rows != b.rows).sum() > max(len(a.rows) // 10, 1):
                return float("inf")
            worst = max(worst, float(np.abs(a.scores - b.scores).max(initial=0)))
        elif hasattr(a, "values"):
            worst = max(worst, float(np.abs(a.values - b.values).max()))
    return worst


def level_likelihoods(device: str) -> float:
    """Compares likelihood scores of a model that has only level heads."""
    here, there = (recommending(d, autoregressive=False) for d in ("cpu", device))
    return difference(here.engine, there.engine, here.ask("likelihood"), there.ask("likelihood"))


def rankings(device: str) -> float:
    """Compares rankings with a cold and with a cached prefix."""
    here, there = ranking("cpu"), ranking(device)
    return max(difference(here.engine, there.engine, here.ask(), there.ask()) for _ in range(2))


def label_scores(device: str) -> float:
    """Compares label scores of two equal requests in one step."""
    engines = text_engine("cpu"), text_engine(device)
    return difference(*engines, [text_scores("cpu")] * 2, [text_scores(device)] * 2)


def text_difference(device: str, drafter: str, rule: str, parameters: str) -> float:
    """Returns 0, or infinity if a token differs."""
    names = () if drafter == "none" else (drafter,)
    here, there = text_engine("cpu", names), text_engine(device, names)
    asked = texts(drafter, rule, parameters)
    for requests in (asked, asked[:1]):
        pairs = zip(here.run_many(requests), there.run_many(requests), strict=True)
        if any(a.tokens.tolist() != b.tokens.tolist() for a, b in pairs):
            return float("inf")
    return 0.0


def larger(device: str) -> float:
    """Compares slates of beam width 50 in a catalogue of realistic size."""
    catalogue, worst = drawn_catalogue(12_101), 0.0
    models = [
        drawn_recommender(catalogue, 256, 4, "children", torch.float32).to(d)
        for d in ("cpu", device)
    ]
    for model in models:
        model.bind_items(catalogue.codes)
    engines = [recommender_engine(model, 2**28) for model in models]
    for strategy in ("beam", "nezha"):
        asked: list[list[Any]] = [
            [
                SlateQuery(
                    prefix=recommend_prefix(model, n, n),
                    trie=catalogue.trie.to(d),
                    k=10,
                    beam_width=50,
                    strategy=strategy,
                )
                for n in (5, 50)
            ]
            for model, d in zip(models, ("cpu", device), strict=True)
        ]
        worst = max(worst, difference(engines[0], engines[1], *asked))
    return worst


def requests_of(
    model: Recommender, trie: Trie, strategy: Any, cell: tuple[int, int], events: int, seed: int
) -> list[SlateQuery]:
    """Returns random requests; `cell` is their number and the beam width."""
    batch, width = cell
    prefixes = [recommend_prefix(model, events, 1000 * seed + i) for i in range(batch)]
    return [
        SlateQuery(prefix=prefix, trie=trie, k=10, beam_width=width, strategy=strategy)
        for prefix in prefixes
    ]


def cold_and_warm(
    engine: Engine, requests: Callable[[int], list[Any]], seeds: range, again: int
) -> tuple[dict[str, float], list[Any]]:
    """Returns median milliseconds of cold and of warm requests, and the last results.

    Cold requests come from new users, one seed each; warm ones repeat the last seed `again` times.
    """
    times, answers = {}, list[Any]()
    for state, asked in (("cold", seeds), ("warm", [seeds[-1]] * again)):
        taken = []
        for seed in asked:
            if state == "cold":
                engine.forget_all()
            made = requests(seed)
            began = time.perf_counter()
            answers = engine.run_many(made)
            taken.append((time.perf_counter() - began) * 1e3)
        times[f"{state}_ms"] = float(np.median(taken[1:]))
    return times, answers


def timed(engine: Engine, asked: Callable[[int], list[Any]]) -> dict[str, Any]:
    """Returns milliseconds, forward passes of the last search, and the number of replays."""
    searches = engine.searches
    before = searches.counts["replayed"] if searches is not None else 0
    times, answers = cold_and_warm(engine, asked, range(1, 6), 10)
    row: dict[str, Any] = {"rounds": getattr(answers[0], "rounds", 0), **times}
    if searches is not None:
        row["replayed"] = searches.counts["replayed"] - before
    return row


def engine_rows(device: str, smoke: bool, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Yields milliseconds of rankings, then of slates per model, strategy and batch."""
    for count in (40,) if smoke else (500, 4000):
        if deadline.passed():
            return
        name = f"rank {count} candidates, warm"
        yield attempted(name, partial(ranked, device, smoke, count, name))
    catalogue = small_catalogue() if smoke else drawn_catalogue(12_101)
    for size in ((64, 1),) if smoke else ((256, 4), (1024, 12)):
        if deadline.passed():
            return
        try:
            yield from slates(device, smoke, deadline, catalogue, size)
        except Exception as error:
            yield failure(f"recommend {size[0]}x{size[1]}", error)


def ranked(device: str, smoke: bool, count: int, name: str) -> dict[str, Any]:
    """Returns the milliseconds to rank `count` candidates with a cached prefix."""
    ranker = drawn_ranker(500 if smoke else 12_101, 64 if smoke else 512, 1 if smoke else 3)
    ranker = ranker.to(device)
    ranker.freeze_items()
    engine = build_engine(
        EngineModels(ranker=ranker), EngineConfig(kv_bytes=2**24 if smoke else 2**31)
    )
    prefix = drawn_ranking_prefix(ranker, 40 if smoke else 1000, 0)
    prefix = replace(prefix, inputs=on_device(prefix.inputs, device))
    asked = on_device(candidates(ranker, count, 1), device)
    taken = []
    for _ in range(12):
        began = time.perf_counter()
        engine.run(RankQuery(prefix, asked))
        taken.append((time.perf_counter() - began) * 1e3)
    return {"engine": name, "warm_ms": float(np.median(taken[2:]))}


def slates(
    device: str, smoke: bool, deadline: Deadline, catalogue: Catalogue, size: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    """Yields the times of slates of one model."""
    hidden, layers = size
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = drawn_recommender(catalogue, hidden, layers, "children", dtype, level_heads=True)
    model = model.to(device)
    model.bind_items(catalogue.codes)
    trie = catalogue.trie.to(device)
    cells = ((1, 10),) if smoke else ((1, 50), (8, 50), (64, 50), (1, 256))
    for how in ("recorded", "launched"):
        engine = recommender_engine(model, 2**24 if smoke else 2**33)
        strategies = engine.selectable
        if how == "recorded":
            strategies = ("beam", "nezha")
            shapes = tuple(SearchShape(*cell) for cell in cells if cell[0] < 64)
            yield from lost(f"{hidden}x{layers}", engine, model, trie, shapes, 64)
        for strategy, (batch, width) in product(strategies, cells):
            if deadline.passed():
                return
            name = f"recommend {hidden}x{layers} {strategy}, {how}, batch {batch} beam {width}"
            asked = partial(requests_of, model, trie, strategy, (batch, width), 50)
            row = attempted(name, partial(timed, engine, asked))
            yield row if "ok" in row else {"engine": name, "dtype": str(dtype)[6:], **row}


def lost(
    name: str,
    engine: Engine,
    model: Recommender,
    trie: Trie,
    shapes: tuple[SearchShape, ...],
    room: int,
) -> Iterator[dict[str, Any]]:
    """Captures searches; yields a row for each that failed and therefore runs eagerly."""
    with complaints() as heard:
        row = attempted(f"searches of {name}: recorded", lambda: {
            "lost": recorded(engine, model, trie, shapes, room).missing
        })  # fmt: skip
    if "ok" in row:
        yield row
    elif row["lost"]:
        yield failure(f"searches of {name}, not recorded: {row['lost']}", "; ".join(heard))
