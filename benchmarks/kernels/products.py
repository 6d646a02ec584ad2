"""Measures products with the weights of a decoder on a CPU: C, torch and 8-bit weights in turns.

    OMP_NUM_THREADS=1 python -m benchmarks.kernels.products
    RECSERVE_ISA=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \\
        OMP_NUM_THREADS=1 python -m benchmarks.kernels.products   # as on a machine with AVX2 only

Each call multiplies the rows by all matrices in turn. Together the matrices exceed the caches, so a
call with one row takes what reading the weights takes. Prints the machine, its instruction sets and
a table of medians in ms, with one thread of process time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.support.timing import alternating, machine
from recserve.kernels.linear import int8
from recserve.kernels.linear.int8 import Int8Weight
from recserve.kernels.linear.panels import Panels
from recserve.kernels.linear.products import ROWS, OneDnnProduct, onednn_multiplies
from recserve.kernels.native import native

Product = Callable[[Tensor], Tensor]


def torch_product(weight: Tensor) -> Product:
    """Returns the product with a weight [n, m] where C does not multiply."""
    if onednn_multiplies(weight.dtype):
        return OneDnnProduct(weight, None)
    return lambda x: F.linear(x, weight)


def onednn_bfloat16(weight: Tensor) -> Product:
    """Returns oneDNN's product of bfloat16, whose bits depend on the number of rows with AMX."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, None, "none", [], "")


def methods(size: int, inner: int, copies: int) -> dict[str, tuple[torch.dtype, list[Product]]]:
    """Returns the products of every method, with the type of their inputs."""
    found: dict[str, tuple[torch.dtype, list[Product]]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        draw = torch.Generator().manual_seed(0)
        weights = [torch.randn(size, inner, generator=draw).to(dtype) for _ in range(copies)]
        name = str(dtype).removeprefix("torch.")
        found[f"{name}, torch"] = dtype, [torch_product(w) for w in weights]
        if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            found["bfloat16, oneDNN (not served)"] = dtype, [onednn_bfloat16(w) for w in weights]
        if native.library() is not None:
            found[f"{name}, C"] = dtype, [Panels.of(w, None) for w in weights]
            if dtype == torch.float32:
                halves = [Panels.of(w.half(), None, torch.float32) for w in weights]
                found["float16 x float32, C"] = dtype, halves
            rounded = map(Int8Weight.of, weights)
            found[f"int8 x {name}, C"] = dtype, [int8.panels(w, None, dtype) for w in rounded]
    return found


@torch.inference_mode()
def medians(
    found: dict[str, tuple[torch.dtype, list[Product]]], rows: int, inner: int, budget_s: float
) -> dict[str, float]:
    """Returns the median time in ms of each method for this number of rows."""
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(1))

    def call(dtype: torch.dtype, products: list[Product]) -> Callable[[], object]:
        inputs = x.to(dtype)
        return lambda: [product(inputs) for product in products]

    return alternating({name: call(*pair) for name, pair in found.items()}, budget_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, default=(3072, 1024), help="outputs, inputs")
    parser.add_argument("--copies", type=int, default=24, help="number of matrices")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 2, 6, 16, 64))
    parser.add_argument("--budget-s", type=float, default=4.0, help="seconds for one row count")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    (size, inner), facts = given.shape, machine("cpu")
    print(json.dumps(facts))
    found = methods(size, inner, given.copies)
    times = {rows: medians(found, rows, inner, given.budget_s) for rows in given.rows}
    table = Table("weights, kernel", *(f"{rows} rows" for rows in times), "GB/s with the fewest")
    for name in found:
        width = 1 if name.startswith("int8") else 4 if name.startswith("float32") else 2
        size_bytes = size * inner * given.copies * width
        speed = size_bytes / times[min(times)][name] / 1e6
        table.add_row(name, *(f"{ms[name]:.1f}" for ms in times.values()), f"{speed:.0f}")
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps({"machine": facts, "ms": times}))


if __name__ == "__main__":
    main()
