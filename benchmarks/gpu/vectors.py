"""Checks and times of faiss on a device, for `dense`, `specgr` and `build`.

Lines of the device need a build of faiss for GPUs, and all lines need faiss. What is missing is
named in a row `cut`. `python benchmarks/gpu.py` runs this module.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.checks import Task
from benchmarks.gpu.engine import requests_of, small_catalogue, timed
from benchmarks.support.drawn import drawn_catalogue, drawn_recommender
from benchmarks.support.failures import attempted
from benchmarks.support.timing import Deadline
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.dense_retriever import DenseRetriever, RetrieverConfig
from recserve.search.strategy import Heads

WIDTH = 64
NEAREST = 50


def lacks(device: str) -> str:
    """Returns why faiss cannot search on the device; empty if it can."""
    try:
        from recserve.features.vectors.faiss_gpu import has_gpu
    except (ImportError, RuntimeError) as error:
        return f"{error}"
    return "" if device == "cuda" and has_gpu() else "this faiss has no GPU"


def unit(count: int, seed: int) -> np.ndarray:
    """Returns random vectors [count, WIDTH] around 256 centres, of length 1."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((256, WIDTH))
    drawn = centres[rng.integers(0, 256, count)] + rng.standard_normal((count, WIDTH))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), np.float32)


def indexes(vectors: np.ndarray, device: str, flat_below: int = 50_000) -> dict[str, Any]:
    """Returns the index of the host and, where faiss can search there, of the device."""
    from recserve.features.vectors.faiss_gpu import faiss_gpu
    from recserve.features.vectors.vector_index import FaissIndex, VersionIndex
    from recserve.search.device_index import DeviceIndex

    host = VersionIndex.on(FaissIndex(vectors, flat_below))
    if lacks(device):
        return {"host": host}
    return {"host": host, "device": DeviceIndex.on(host, faiss_gpu(), torch.device(device))}


def missed(device: str, count: int, flat_below: int, k: int) -> float:
    """Returns how much of the exact k nearest items the device misses, beyond what the host does.

    A flat index of the host misses none; inverted lists miss some.
    """
    vectors, queries = unit(count, 1), unit(64, 2)
    exact = indexes(vectors, "cpu", count + 1)["host"].search(queries, k)[0]
    recall = {}
    for place, index in indexes(vectors, device, flat_below).items():
        found = zip(exact, index.search(queries, k)[0], strict=True)
        recall[place] = float(np.mean([np.isin(a, b).mean() for a, b in found]))
    return abs(recall["host"] - recall["device"])


def vector_checks(device: str, smoke: bool, deadline: Deadline, *_: Any) -> Iterator[Any]:
    """Yields comparisons of the device's index with the exact one of the CPU."""
    if note := lacks(device):
        yield {"cut": "vector checks", "note": note}
        return
    count = 300 if smoke else 20_000
    for k in (1, NEAREST, count // 4):
        check = partial(missed, device, count, count + 1, k)
        yield {"task": Task(f"index of {count} items, flat, k {k}: the CPU's items", check, 1e-3)}
    check = partial(missed, device, 5 * count, count, NEAREST)
    yield {"task": Task(f"index of {5 * count} items, lists: the CPU's recall", check, 1e-2)}


def vector_rows(device: str, smoke: bool, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Yields milliseconds of searches and slates and seconds of `build`, with and without."""
    if note := lacks(device):
        yield {"cut": "vectors: the lines of the device", "note": note}
    if (note and "has no GPU" not in note) or deadline.passed():
        return
    yield from searches(device, smoke, deadline)
    yield from slates(device, smoke, deadline)
    yield from fits(device, smoke, deadline)


def searches(device: str, smoke: bool, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Yields times of searches alone, from queries on the device to rows on the host."""
    for count in (300,) if smoke else (12_101, 200_000):
        queries = torch.from_numpy(unit(64, 2)).to(device)
        for place, index in indexes(unit(count, 1), device).items():
            if deadline.passed():
                return
            taken = []
            for _ in range(12):
                began = time.perf_counter()
                if place == "device":
                    index.search_then_read(queries, NEAREST)
                else:
                    index.search(queries.cpu().numpy(), NEAREST)
                taken.append((time.perf_counter() - began) * 1e3)
            name = f"nearest {NEAREST} of {count} items, 64 queries, faiss on the {place}"
            yield {"vectors": name, "ms": float(np.median(taken[2:]))}


def slates(device: str, smoke: bool, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Yields times of `dense` and `specgr`."""
    catalogue = small_catalogue() if smoke else drawn_catalogue(12_101)
    hidden, layers = (64, 1) if smoke else (256, 4)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = drawn_recommender(catalogue, hidden, layers, "children", dtype).to(device)
    model.bind_items(catalogue.codes)
    config = RetrieverConfig(hidden, WIDTH, ("click",), (1.0,), "events", (1, 4), (0.5, 0.5))
    retriever = DenseRetriever(config)
    retriever.start_from(model)
    retriever = retriever.to(device, dtype).eval().requires_grad_(False)
    models = EngineModels(model, heads=Heads(retriever=retriever))
    engine = build_engine(models, EngineConfig(kv_bytes=2**24 if smoke else 2**32, graphs=False))
    trie = catalogue.trie.to(device)
    for place, index in indexes(unit(trie.num_rows, 1), device).items():
        for strategy in ("dense", "specgr"):
            for cell in ((1, 10),) if smoke else ((1, 50), (64, 50)):
                if deadline.passed():
                    return

                def asked(seed: int, i: Any = index, s: str = strategy, c: Any = cell) -> list[Any]:
                    made = requests_of(model, trie, s, c, 50, seed)
                    return [replace(one, index=i) for one in made]

                name = f"{strategy}, faiss on the {place}, batch {cell[0]} beam {cell[1]}"
                row = attempted(name, partial(timed, engine, asked))
                yield row if "ok" in row else {"vectors": name, **row}


def fits(device: str, smoke: bool, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Yields seconds of quantisation, as in `build`."""
    from recserve.features.vectors.faiss_gpu import faiss_gpu
    from recserve.features.vectors.quantizer import fit_quantizer

    vectors = unit(300 if smoke else 12_101, 1)
    for kind, sizes in (("residual", (256,) * 4), ("product", (256,) * 16)):
        for place in ("host",) if lacks(device) else ("host", "device"):
            if deadline.passed():
                return
            gpu, began = faiss_gpu() if place == "device" else None, time.perf_counter()
            fit_quantizer(kind, vectors, sizes, 0, gpu).encode(vectors, gpu)
            name = f"build, {kind}, {len(vectors)} items, faiss on the {place}"
            yield {"vectors": name, "seconds": time.perf_counter() - began}
