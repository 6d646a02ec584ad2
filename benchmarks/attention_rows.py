"""Tree attention against its rivals, one row per shape, and how a row reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import attention
import torch
from attention import Shape
from timing import alternating, graph_milliseconds, host_microseconds, milliseconds

TEXT, ITEMS = (32, 8, 128), (4, 4, 64)
FLEX_SHAPES = 9  # FlexAttention compiles for each; the first shapes are the most telling
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
    """Every cell the CPU path is to be no slower in, batches and heads inmost."""
    sizes = product((32, 64, 128), (200, 1000, 2000, 8000), (1, 16, 64, 256))
    heads = ((8, 8), (8, 2), (16, 4))
    return [
        Shape("tree", batch, root, nodes, *pair, dim)
        for dim, root, nodes in sizes
        for pair, batch in product(heads, (1, 8))
    ]


def cuda_shapes(smoke: bool = False) -> list[Shape]:
    """Roots 200 to 32k, trees of 1 to 2,000 nodes, batches 1 to 64, most telling first."""
    if smoke:
        shapes = [Shape("tree", 2, 40, 9, 4, 2, 32), Shape("branches", 1, 20, 33, 2, 2, 16)]
        return [*shapes, Shape("chain", 1, 0, 21, 4, 2, 16)]
    shapes = [Shape("tree", 1, 8192, 64, *TEXT), Shape("tree", 1, 32768, 64, *TEXT)]
    shapes += [Shape("tree", 1, root, n, *TEXT) for root in (200, 2048) for n in (1, 16, 64, 256)]
    shapes += [Shape("tree", b, 2048, 64, *TEXT) for b in (8, 64)]
    shapes += [Shape("tree", b, 8192, n, *TEXT) for b, n in ((16, 1), (16, 16), (16, 64))]
    shapes += [Shape("tree", 1, 32768, n, *TEXT) for n in (1, 16, 256)]
    shapes += [Shape("branches", b, 200, 2000, *ITEMS) for b in (1, 8)]
    shapes += [Shape("branches", 1, 2048, 2000, *TEXT), Shape("tree", 64, 200, 50, *ITEMS)]
    shapes += [Shape("chain", 1, root, 2000, *TEXT) for root in (0, 2048)]
    shapes += [Shape("tree", 8, root, 64, *TEXT) for root in (8192, 32768)]
    shapes += [Shape("tree", 64, 32768, 1, *TEXT)]
    return shapes


def rivals(device: str, number: int) -> dict[str, Callable[..., Any]]:
    """Who is measured at the shape of this number; FlexAttention is in `flex_rows`."""
    found: dict[str, Callable[..., Any]] = {"ours": attention.ours, "sdpa": attention.sdpa}
    if number < FP8_SHAPES:
        found["fp8"] = attention.ours_fp8
    if device == "cuda":
        found["flash (no tree mask)"] = attention.flash
    return found


def attention_rows(
    shapes: list[Shape],
    dtype: torch.dtype,
    device: str,
    deadline: float = float("inf"),
    cpu_s: float = 4.0,
) -> Iterator[dict[str, Any]]:
    """One row per shape; shapes behind the deadline (time.monotonic) are left out. cpu_s: seconds
    for one shape on a CPU.
    """
    for number, shape in enumerate(shapes):
        if time.monotonic() > deadline:
            return
        problem = attention.draw(shape, dtype, device)
        row: dict[str, Any] = {"shape": shape.name(), "dtype": str(dtype).removeprefix("torch.")}
        if device == "cpu":
            with torch.inference_mode():  # as the engine runs
                calls = {name: build(problem) for name, build in rivals(device, number).items()}
                row |= {f"{name}_us": 1e3 * ms for name, ms in alternating(calls, cpu_s).items()}
            row["sdpa_to_ours"] = row["sdpa_us"] / row["ours_us"]
        for name, build in rivals(device, number).items() if device == "cuda" else ():
            row |= timed(name, build, problem, device)
        if device == "cuda":
            call = attention.ours(problem)
            row["graph_us"], row["host_us"] = in_graph(call), host_microseconds(call)
        row["gb_s"] = problem.bytes() / row["ours_us"] / 1e3
        row["tflop_s"] = problem.operations() / row["ours_us"] / 1e6
        yield row


def flex_rows(
    shapes: list[Shape], dtype: torch.dtype, device: str, deadline: float
) -> Iterator[dict[str, Any]]:
    """FlexAttention beside ours at the first shapes, once all others are measured: it compiles for
    each, which takes longer than all that is measured there.
    """
    for shape in shapes[:FLEX_SHAPES]:
        if time.monotonic() > deadline:
            return
        problem = attention.draw(shape, dtype, device)
        row: dict[str, Any] = {"shape": f"{shape.name()}, flex", "dtype": str(dtype)[6:]}
        row |= timed("ours", attention.ours, problem, device)
        row |= timed("flex", attention.flex, problem, device)
        row["gb_s"] = problem.bytes() / row["ours_us"] / 1e3
        row["tflop_s"] = problem.operations() / row["ours_us"] / 1e6
        yield row


def timed(
    name: str, build: Callable[..., Any], problem: attention.Problem, device: str
) -> dict[str, Any]:
    """Microseconds of one of them. A rival that cannot run this is a finding, not a failure."""
    try:
        return {f"{name}_us": 1e3 * milliseconds(build(problem), device)}
    except Exception as error:
        if name == "ours":
            raise
        return {f"{name}_us": None, f"{name}_error": f"{type(error).__name__}: {error}"[:200]}


def in_graph(call: Callable[[], Any]) -> float | None:
    """Microseconds inside a CUDA graph, caches warm; None where it cannot be captured."""
    try:
        return 1e3 * graph_milliseconds(call)
    except RuntimeError:
        return None


def with_share(row: dict[str, Any], ceiling: dict[str, float]) -> dict[str, Any]:
    """Adds the share of the nearer ceiling."""
    copied = row.get("gb_s", 0.0) / ceiling["copy_gb_s"]
    computed = row.get("tflop_s", 0.0) / ceiling["matmul_tflop_s"]
    return row | {"share": max(copied, computed)}


def line(row: dict[str, Any]) -> str:
    """One row for a terminal: times first."""
    name = row.get("shape") or row["kernel"]
    times = {k.removesuffix("_us"): v for k, v in row.items() if k.endswith("_us")}
    shown = "  ".join(f"{k} {v:,.1f}" if v else f"{k} -" for k, v in times.items())
    rates = f"{row['gb_s']:,.0f} GB/s  {row.get('tflop_s', 0.0):.2f} TFLOP/s  {row['share']:.0%}"
    return f"{name:<44} us: {shown}  {rates}"
