"""An engine with its default configuration, at the shape of the goals: what `serve` starts first.

All other parts choose what is captured. This one takes the defaults: the size of the key-value
cache, the captured searches and prefills, and the engine's thread. It compares slates with those of
an engine that launches every kernel, then cancels requests, changes the catalogue, and fills the
cache. `python benchmarks/gpu.py` runs this module.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.engine import recommender_engine, requests_of, small_catalogue
from benchmarks.gpu.searches import QWEN3_1_7B, wide_catalogue
from benchmarks.support.drawn import drawn_there
from benchmarks.support.failures import complaints, failure
from benchmarks.support.timing import Deadline
from recserve.core.request import Slate, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.trie.insertion import insert_items
from recserve.models.config import DecoderConfig


def default_rows(device: str, smoke: bool, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Yields the engine's start, the agreement of slates, and latencies under load."""
    shape = DecoderConfig(64, 2, 2, 1, 32, 128, qk_norm=True) if smoke else QWEN3_1_7B
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    catalogue = small_catalogue() if smoke else wide_catalogue(1_000_000, 8192)
    model = drawn_there(catalogue, shape, dtype, device)
    trie = catalogue.trie.to(device)
    events, width, users = (8, 10, 4) if smoke else (333, 256, 24)
    # Before the engine with the defaults, which takes all memory that is left.
    launching = recommender_engine(model, 2**24 if smoke else 2**33)
    asked = [
        request
        for seed in range(users)
        for request in requests_of(model, trie, "beam", (1, width), events, seed)
    ]
    expected = launching.run_many(asked)
    del launching
    began = time.perf_counter()
    with complaints() as heard:
        engine = build_engine(EngineModels(model), EngineConfig())
        built_s = time.perf_counter() - began
        engine.capture(trie)
    stats = engine.stats()
    yield {
        "engine": "defaults: start",
        "built_s": built_s,
        "start_s": time.perf_counter() - began,
        "kv_tokens": engine.token_capacity("recommender"),
        "captured": len(stats.graph_seconds),
        "capture_s": sum(stats.graph_seconds.values()),
        "graph_mib": sum(stats.graph_bytes.values()) / 2**20,
        "missing": stats.unrecorded,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else 0.0,
        "complaints": heard,
    }
    engine.start()
    try:
        jobs = (
            partial(together, engine, asked, expected, "cold"),
            partial(together, engine, asked, expected, "warm"),
            partial(one_by_one, engine, asked, expected),
            partial(after_cancellations, engine, asked, expected),
            partial(changed_catalogue, engine, asked, catalogue.codes),
        )
        for job in jobs:
            if deadline.passed():
                return
            try:
                yield job()
            except Exception as error:
                yield failure(f"defaults: {job.func.__name__}", error)
    finally:
        engine.close()


def agreement(got: list[Any], expected: list[Any]) -> dict[str, float]:
    """Returns the share of equal items and the largest difference of scores of equal items."""
    shares, worst = [], 0.0
    for one, other in zip(got, expected, strict=True):
        assert isinstance(one, Slate) and isinstance(other, Slate)
        _, here, there = np.intersect1d(one.rows, other.rows, return_indices=True)
        shares.append(len(here) / len(other.rows))
        if len(here):
            worst = max(worst, float(np.abs(one.scores[here] - other.scores[there]).max()))
    return {"same_items": float(np.mean(shares)), "score_difference": worst}


def together(
    engine: Engine, asked: list[SlateQuery], expected: list[Any], state: str
) -> dict[str, Any]:
    """Returns the time of all requests at once, and the slowest."""
    began, ends = time.perf_counter(), list[float]()
    futures = [engine.submit(request) for request in asked]
    for future in futures:
        future.add_done_callback(lambda _: ends.append(time.perf_counter() - began))
    got = [future.result() for future in futures]
    return {
        "engine": f"defaults: {len(asked)} requests at once, {state}",
        "median_ms": float(np.median(ends)) * 1e3,
        "last_ms": max(ends) * 1e3,
        **agreement(got, expected),
        "graph_searches": engine.stats().graph_searches,
    }


def one_by_one(engine: Engine, asked: list[SlateQuery], expected: list[Any]) -> dict[str, Any]:
    """Returns the latency of warm requests, each alone."""
    taken, got = [], []
    for request in asked:
        began = time.perf_counter()
        got.append(engine.submit(request).result())
        taken.append((time.perf_counter() - began) * 1e3)
    return {
        "engine": "defaults: one request at a time, warm",
        "median_ms": float(np.median(taken)),
        "worst_ms": max(taken),
        **agreement(got, expected),
    }


def after_cancellations(
    engine: Engine, asked: list[SlateQuery], expected: list[Any]
) -> dict[str, Any]:
    """Cancels every other request of a burst; the rest get their slates and no page is lost."""
    engine.forget_all()
    free = engine.stats().pages_free
    futures = [engine.submit(request) for request in asked]
    for future in futures[::2]:
        future.cancel()
    got = [future.result() for future in futures[1::2]]
    deadline = time.perf_counter() + 5
    while engine.stats().running and time.perf_counter() < deadline:
        time.sleep(0.01)
    engine.forget_all()
    if engine.stats().pages_free != free:
        raise RuntimeError(f"{free - engine.stats().pages_free} pages are lost")
    return {"engine": "defaults: cancellations", **agreement(got, expected[1::2])}


def changed_catalogue(
    engine: Engine, asked: list[SlateQuery], codes: torch.Tensor
) -> dict[str, Any]:
    """Hides the first item of a slate and adds an id; the search is replayed over the new version.

    The item that was hidden must not return.
    """
    old = asked[0]
    first = engine.submit(old).result()
    assert isinstance(first, Slate)
    drawn = np.random.default_rng(1).integers(0, old.trie.codebook_sizes, (1000, codes.shape[1]))
    new = next(one for one in torch.from_numpy(drawn) if not bool((codes == one).all(1).any()))
    device, rows = old.trie.device, old.trie.num_rows
    version = insert_items(
        old.trie,
        new[None].to(device),
        torch.tensor([rows], device=device),
        rows + 1,
        torch.tensor([int(first.rows[0])], device=device),
    )
    replayed = engine.stats().graph_searches.get("replayed", 0)
    second = engine.submit(
        SlateQuery(
            prefix=old.prefix, trie=version, k=old.k, beam_width=old.beam_width, strategy="beam"
        )
    ).result()
    assert isinstance(second, Slate)
    if first.rows[0] in second.rows:
        raise RuntimeError(f"the hidden item {first.rows[0]} is in the slate {second.rows}")
    return {
        "engine": "defaults: a new catalogue version",
        "replayed": engine.stats().graph_searches.get("replayed", 0) - replayed,
        "same_items": len(set(first.rows.tolist()) & set(second.rows.tolist())) / len(first.rows),
    }
