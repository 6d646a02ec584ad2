"""Measurements of tree attention against its alternatives, one row per shape.

`benchmarks.kernels.times` and `python benchmarks/gpu.py` print these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.kernels import attention
from benchmarks.kernels.attention import Shape
from benchmarks.support.failures import attempted
from benchmarks.support.timing import (
    Deadline,
    alternating,
    graph_milliseconds,
    host_microseconds,
    milliseconds,
)

TEXT, ITEMS = (32, 8, 128), (4, 4, 64)
FIRST_SHAPES = 2  # number of shapes that a goal names
FLEX_SHAPES = 9  # FlexAttention compiles for each shape, so it runs only on the first ones
FP8_SHAPES = 14

CPU_SHAPES = [
    Shape("tree", 1, 2000, 64, 8, 8, 64),
    Shape("branches", 1, 200, 2000, 8, 8, 64),
    Shape("tree", 1, 2000, 64, *TEXT),
    Shape("branches", 1, 200, 2000, *TEXT),
    Shape("tree", 1, 200, 16, *ITEMS),
    Shape("tree", 1, 200, 50, *ITEMS),
    Shape("tree", 1, 200, 256, *ITEMS),
    Shape("tree", 8, 200, 50, *ITEMS),
    Shape("tree", 1, 0, 64, *ITEMS),
    Shape("tree", 1, 8000, 64, *ITEMS),
]


def cpu_grid() -> list[Shape]:
    """Returns all shapes in which the CPU path must not be slower; the batch varies fastest."""
    sizes = product((32, 64, 128), (200, 1000, 2000, 8000), (1, 16, 64, 256))
    heads = ((8, 8), (8, 2), (16, 4))
    return [
        Shape("tree", batch, prefix, nodes, *pair, dim)
        for dim, prefix, nodes in sizes
        for pair, batch in product(heads, (1, 8))
    ]


def cuda_shapes(smoke: bool = False) -> list[Shape]:
    """Returns shapes with prefixes of 200 to 32k tokens, trees of 1 to 2,000 nodes and batches of 1
    to 64.

    The most informative shapes come first.
    """
    if smoke:
        shapes = [Shape("tree", 2, 40, 9, 4, 2, 32), Shape("branches", 1, 20, 33, 2, 2, 16)]
        return [*shapes, Shape("chain", 1, 0, 21, 4, 2, 16)]
    shapes = [Shape("tree", 1, 8192, 64, *TEXT), Shape("tree", 1, 32768, 64, *TEXT)]
    shapes += [
        Shape("tree", 1, prefix, n, *TEXT) for prefix in (200, 2048) for n in (1, 16, 64, 256)
    ]
    shapes += [Shape("tree", b, 2048, 64, *TEXT) for b in (8, 64)]
    shapes += [Shape("tree", b, 8192, n, *TEXT) for b, n in ((16, 1), (16, 16), (16, 64))]
    shapes += [Shape("tree", 1, 32768, n, *TEXT) for n in (1, 16, 256)]
    shapes += [Shape("branches", b, 200, 2000, *ITEMS) for b in (1, 8)]
    shapes += [Shape("branches", 1, 2048, 2000, *TEXT), Shape("tree", 64, 200, 50, *ITEMS)]
    shapes += [Shape("chain", 1, prefix, 2000, *TEXT) for prefix in (0, 2048)]
    shapes += [Shape("tree", 8, prefix, 64, *TEXT) for prefix in (8192, 32768)]
    shapes += [Shape("tree", 64, 32768, 1, *TEXT)]
    return shapes


def dense_candidates(device: str, number: int) -> dict[str, Callable[..., Any]]:
    """Returns the methods to measure at shape `number`; FlexAttention is in `flex_rows`."""
    found: dict[str, Callable[..., Any]] = {"ours": attention.ours, "sdpa": attention.sdpa}
    if number < FP8_SHAPES:
        found["fp8"] = attention.ours_fp8
    if device == "cuda":
        found["flash (no tree mask)"] = attention.flash
    return found


def attention_rows(
    shapes: Iterable[tuple[int, Shape]],
    dtype: torch.dtype,
    device: str,
    deadline: Deadline,
    cpu_s: float = 4.0,
) -> Iterator[dict[str, Any]]:
    """Yields one numbered row per shape, until the deadline.

    Args:
        shapes: Numbered shapes.
        dtype: Type of queries, keys and values.
        device: `cuda` or `cpu`.
        deadline: No shape starts after it.
        cpu_s: Seconds for one shape on a CPU.
    """
    for number, shape in shapes:
        if deadline.passed():
            return
        measure = on_cpu if device == "cpu" else on_cuda
        how = partial(measure, shape, dtype, number, cpu_s)
        yield attempted(f"attention {shape.name()}", how)


def on_cpu(shape: Shape, dtype: torch.dtype, number: int, seconds: float) -> dict[str, Any]:
    """Times this project's attention and its alternatives in turns, as the engine runs."""
    problem = attention.draw(shape, dtype, "cpu")
    with torch.inference_mode():
        calls = {name: build(problem) for name, build in dense_candidates("cpu", number).items()}
        times = {f"{name}_us": 1e3 * ms for name, ms in alternating(calls, seconds).items()}
    times["sdpa_to_ours"] = times["sdpa_us"] / times["ours_us"]
    return named(shape, dtype) | times | rates(problem, times)


def on_cuda(shape: Shape, dtype: torch.dtype, number: int, _: float) -> dict[str, Any]:
    """Times the methods one after another; ours also inside a CUDA graph and on the host."""
    problem = attention.draw(shape, dtype, "cuda")
    call = attention.ours(problem)
    times: dict[str, Any] = {"ours_us": 1e3 * milliseconds(call, "cuda")}
    for name, build in dense_candidates("cuda", number).items():
        times |= {} if name == "ours" else timed(name, build, problem)
    times |= {"graph_us": in_graph(call), "host_us": host_microseconds(call)}
    return named(shape, dtype) | times | rates(problem, times)


def flex_row(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Times FlexAttention and ours; FlexAttention compiles for each shape, which takes long."""
    problem = attention.draw(shape, dtype, "cuda")
    times = {"ours_us": 1e3 * milliseconds(attention.ours(problem), "cuda")}
    row = named(shape, dtype) | times | timed("flex", attention.flex, problem)
    return row | rates(problem, times) | {"shape": f"{shape.name()}, flex"}


def flex_rows(
    shapes: Iterable[tuple[int, Shape]], dtype: torch.dtype, deadline: Deadline
) -> Iterator[dict[str, Any]]:
    """Yields one row for each of the first shapes, until the deadline."""
    for number, shape in shapes:
        if number >= FLEX_SHAPES:
            continue
        if deadline.passed():
            return
        yield attempted(f"attention {shape.name()}, flex", partial(flex_row, shape, dtype))


def named(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the columns that identify a row."""
    return {"shape": shape.name(), "dtype": str(dtype).removeprefix("torch.")}


def rates(problem: attention.Problem, times: dict[str, Any]) -> dict[str, float]:
    """Returns the bytes and operations per second of this project's attention."""
    taken = times["ours_us"]
    return {"gb_s": problem.bytes() / taken / 1e3, "tflop_s": problem.operations() / taken / 1e6}


def timed(name: str, build: Callable[..., Any], problem: attention.Problem) -> dict[str, Any]:
    """Returns microseconds of one method; a note instead, if it cannot run this shape."""
    try:
        return {f"{name}_us": 1e3 * milliseconds(build(problem), "cuda")}
    except Exception as error:
        return {f"{name}_us": None, f"{name}_error": f"{type(error).__name__}: {error}"[:200]}


def in_graph(call: Callable[[], Any]) -> float | None:
    """Returns microseconds inside a CUDA graph with warm caches; None if it cannot be captured."""
    try:
        return 1e3 * graph_milliseconds(call)
    except Exception:
        return None


def with_share(row: dict[str, Any], ceiling: dict[str, float]) -> dict[str, Any]:
    """Adds the share of the nearer ceiling; a failed row stays unchanged."""
    if "ok" in row:
        return row
    copied = row.get("gb_s", 0.0) / ceiling["copy_gb_s"]
    computed = row.get("tflop_s", 0.0) / ceiling["matmul_tflop_s"]
    return row | {"share": max(copied, computed)}


def line(row: dict[str, Any]) -> str:
    """Returns one row for a terminal, times first."""
    if "ok" in row:
        return f"FAILED {row['name']}: {row['note']}"
    name = row.get("shape") or row["kernel"]
    times = {k.removesuffix("_us"): v for k, v in row.items() if k.endswith("_us")}
    shown = "  ".join(f"{k} {v:,.1f}" if v else f"{k} -" for k, v in times.items())
    rates = f"{row['gb_s']:,.0f} GB/s  {row.get('tflop_s', 0.0):.2f} TFLOP/s  {row['share']:.0%}"
    return f"{name:<44} us: {shown}  {rates}"
