"""What the device does in a search at the shape of the goals: its products alone, and a profile.

Four questions: the time that the products alone take, the kernels of one search and of one prefill,
the time of a new event behind a cached history, and of many requests at once.
`python benchmarks/gpu.py` runs this module. Where graphs are captured on a CPU, the function runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.engine import (
    lost,
    recommend_prefix,
    recommender_engine,
    requests_of,
    small_catalogue,
    timed,
)
from benchmarks.gpu.searches import QWEN3_1_7B, wide_catalogue
from benchmarks.support.drawn import drawn_there
from benchmarks.support.failures import attempted
from benchmarks.support.timing import Deadline, milliseconds
from recserve.core.request import Prefix, PrewarmQuery, SlateQuery
from recserve.engine.beam_search_graph import SearchShape
from recserve.engine.capture import cuda_prefills
from recserve.engine.engine import Engine
from recserve.kernels.trie.trie import Trie
from recserve.models.config import DecoderConfig
from recserve.models.inputs import NodeInputs
from recserve.models.packing import PackedLinear
from recserve.models.recommender import Recommender

ROWS = (1, 64, 256, 1001, 2048)
MOST_KERNELS = 25
CONCURRENT = (16, 32, 64)


def profile_rows(device: str, smoke: bool, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Yields the rows of all four questions, the most informative first."""
    shape = DecoderConfig(64, 2, 2, 1, 32, 128, qk_norm=True) if smoke else QWEN3_1_7B
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if deadline.passed():
        return
    catalogue = small_catalogue() if smoke else wide_catalogue(1_000_000, 8192)
    model = drawn_there(catalogue, shape, dtype, device)
    trie = catalogue.trie.to(device)
    events, width, most = (8, 10, 1) if smoke else (333, 256, 8)
    engine = recommender_engine(model, 2**24 if smoke else 2**34)
    shapes = tuple(SearchShape(batch, width, 64) for batch in sorted({1, most}))
    yield from lost("the goal shape", engine, model, trie, shapes, 64 if smoke else 4096)
    one = partial(requests_of, model, trie, "beam", (1, width), events)
    jobs: list[Callable[[], Iterator[dict[str, Any]]]] = [
        lambda: profiled("a warm search, replayed", lambda: engine.run_many(one(0)), device),
        lambda: profiled("a prefill", lambda: cold(engine, one), device),
        lambda: appends(engine, model, events, device),
        lambda: products(shape, dtype, device, ROWS[:2] if smoke else ROWS),
        lambda: concurrent(engine, model, trie, (width, events), (3,) if smoke else CONCURRENT),
    ]
    for job in jobs:
        if deadline.passed():
            return
        yield from job()


def cold(engine: Engine, asked: Callable[[int], list[SlateQuery]]) -> None:
    """Computes the prefix of a request without a cache."""
    engine.forget_all()
    engine.run(PrewarmQuery(asked(0)[0].prefix, "recommender"))


def profiled(name: str, call: Callable[[], Any], device: str) -> Iterator[dict[str, Any]]:
    """Yields a row of a call, and a row for each of the kernels that take most of its time.

    `busy_ms` is the sum over kernels. The device is idle for the rest of `wall_ms`, which includes
    the host's part of the call.
    """
    for _ in range(2):
        call()
    wall_ms = milliseconds(call, device)
    activity = torch.profiler.ProfilerActivity
    wanted = [activity.CUDA if device == "cuda" else activity.CPU]
    with torch.profiler.profile(activities=wanted) as profile:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    kind = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    found = sorted(profile.key_averages(), key=lambda event: -float(getattr(event, kind)))
    yield {
        "profile": name,
        "wall_ms": wall_ms,
        "busy_ms": sum(float(getattr(event, kind)) for event in found) / 1e3,
        "launches": sum(event.count for event in found),
    }
    for event in found[:MOST_KERNELS]:
        row = {"us": float(getattr(event, kind)), "count": event.count}
        yield {"profile": name, "kernel": event.key[:80], **row}


def appends(
    engine: Engine, model: Recommender, events: int, device: str
) -> Iterator[dict[str, Any]]:
    """Yields the time to add one event to a cached history: launched, and captured on CUDA."""
    scheduler: Any = engine.schedulers["recommender"]
    yield attempted("append", lambda: appended(engine, model, events, device, "launched"))
    graphs = cuda_prefills(scheduler.runner, scheduler.kv, model, None)
    if graphs is None:
        return
    launched, scheduler.prefills = scheduler.prefills, graphs
    row = attempted("append", lambda: appended(engine, model, events, device, "replayed"))
    yield row | {"replays": graphs.counts["replayed"], "captured": len(graphs.captured)}
    scheduler.prefills = launched


def appended(
    engine: Engine, model: Recommender, events: int, device: str, how: str
) -> dict[str, Any]:
    """Returns milliseconds to add one event to a cached history, with and without the device.

    This is the most frequent request of a live recommender: three rows of a prefill.
    """
    host, whole = [], []
    codes = len(model.config.codebook_sizes) if model.config.input == "codes" else 1
    for seed in range(7):
        after = recommend_prefix(model, events + 1, (9000 if how == "launched" else 9500) + seed)
        before = Prefix(NodeInputs(after.inputs.tokens[:-codes]), after.keys[:-codes])
        engine.run(PrewarmQuery(before, "recommender"))
        _synchronize(device)
        began = time.perf_counter()
        engine.run(PrewarmQuery(after, "recommender"))
        host.append((time.perf_counter() - began) * 1e3)
        _synchronize(device)
        whole.append((time.perf_counter() - began) * 1e3)
    return {
        "profile": f"append one event to {events}, {how}",
        "host_ms": float(np.median(host[2:])),
        "wall_ms": float(np.median(whole[2:])),
    }


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def products(
    shape: DecoderConfig, dtype: torch.dtype, device: str, counts: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Yields the times of the four products of a layer alone, by number of rows.

    `us_int8` is the time with the weight in 8 bits.
    """
    size, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    weights = {
        "qkv": (heads + 2 * shape.num_kv_heads * shape.head_dim, size),
        "output": (size, heads),
        "gate_up": (2 * shape.intermediate_size, size),
        "down": (size, shape.intermediate_size),
    }
    for name, (outputs, inputs) in weights.items():
        weight = torch.randn(outputs, inputs, device=device).to(dtype)
        eight = PackedLinear(weight, stored="int8")
        for rows in counts:
            x = torch.randn(rows, inputs, device=device).to(dtype)
            ms = milliseconds(lambda x=x, w=weight: x @ w.T, device)
            moved = (weight.numel() + rows * (inputs + outputs)) * weight.itemsize
            yield {
                "profile": f"product {name}, {rows} rows",
                "us": ms * 1e3,
                "us_int8": milliseconds(lambda x=x, w=eight: w(x), device) * 1e3,
                "tflop_s": 2 * rows * weight.numel() / ms / 1e9,
                "gb_s": moved / ms / 1e6,
            }


def concurrent(
    engine: Engine,
    model: Recommender,
    trie: Trie,
    cell: tuple[int, int],
    counts: tuple[int, ...],
) -> Iterator[dict[str, Any]]:
    """Yields milliseconds of more requests at once than a graph holds; `cell`: width and events."""
    width, events = cell
    for count in counts:
        asked = partial(requests_of, model, trie, "beam", (count, width), events)
        name = f"{count} requests at once, beam {width}"
        row = attempted(name, lambda a=asked: timed(engine, a))
        yield row if "ok" in row else {"profile": name, **row}
