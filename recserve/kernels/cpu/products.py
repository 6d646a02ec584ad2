"""Products with the weights of a linear layer, packed once for serving on a CPU.

A product of few rows with a plain matrix repacks the matrix on every call, and this repacking
limits its speed. With packed weights, a row costs only the time to read the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.cpu import choice, native
from recserve.kernels.cpu.choice import KernelChoice
from recserve.kernels.cpu.half_panels import HalfPanels, multiplies_halves
from recserve.kernels.cpu.int8_panels import Int8Panels, multiplies_int8
from recserve.kernels.cpu.native import TYPES, Panels
from recserve.kernels.int8 import Int8Weight, TorchInt8Product

# Formats of packed weights other than the activations' type. float16 is used where it is exact.
PackedFormat = Literal["int8", "float16"]
ROWS = 64  # The layout for 64 rows is as fast for one row, and the arithmetic is the same for all.
MEASURED_ROWS = (1, 128)  # a decoding step, and a prompt
# elements of a weight that are measured; times of larger weights are scaled
MEASURED_WEIGHTS = 2**21


class OneDnnWeight:
    """x W^T + b by oneDNN, with W [n, m] in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = _onednn()._reorder_linear_weight(weight, ROWS), bias

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x [..., m] and returns [..., n]."""
        product: Tensor = _onednn()._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product


def onednn_packs(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN has products with packed weights of this type on this machine."""
    if dtype not in TYPES or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(_onednn()._is_mkldnn_bf16_supported())


def choose(weights: Sequence[Tensor], stored: PackedFormat | None = None) -> KernelChoice:
    """Measures products with weights [n, m] of one type in C and torch, with today's threads.

    Args:
        weights: The weights.
        stored: Format in which they are stored. None means their own type.
    """
    return total([(w.shape[0], w.shape[1]) for w in weights], weights[0].dtype, stored)


def total(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, stored: PackedFormat | None = None
) -> KernelChoice:
    """Measures products with weights of these shapes (n, m) and adds up their times.

    Args:
        shapes: Shapes of the weights.
        dtype: Type of the activations.
        stored: Format of the weights. None means the activations' type.
    """
    threads = torch.get_num_threads()
    c, plain = [0.0] * len(MEASURED_ROWS), [0.0] * len(MEASURED_ROWS)
    for size, inner in shapes:
        measured = min(size, max(MEASURED_WEIGHTS // inner, 1))
        found = _measured(measured, inner, dtype, threads, stored)
        for i in range(len(MEASURED_ROWS)):
            c[i] += found.c_ms[i] * size / measured
            plain[i] += found.torch_ms[i] * size / measured
    rows = " and ".join(map(str, MEASURED_ROWS))
    name = type_name(dtype, stored)
    work = f"{len(shapes)} products of {name}, {rows} rows, {threads} threads"
    return KernelChoice(work, tuple(c), tuple(plain))


@functools.cache
def _measured(
    size: int, inner: int, dtype: torch.dtype, threads: int, stored: PackedFormat | None = None
) -> KernelChoice:
    with torch.inference_mode():
        weight = torch.ones(size, inner).to(dtype)
        xs = [torch.ones(rows, inner, dtype=dtype) for rows in MEASURED_ROWS]
        other: Callable[[Tensor], Tensor]
        ours: Callable[[Tensor], Tensor]
        if stored == "int8":
            rounded = Int8Weight.of(weight)
            other = TorchInt8Product(rounded, None)
            ours = Int8Panels.of(rounded, None, dtype) if multiplies_int8(weight) else other
        elif stored == "float16" and multiplies_halves(weight):
            other, ours = OneDnnWeight(weight, None), HalfPanels.of(weight, None)
        else:
            theirs = OneDnnWeight(weight, None) if onednn_packs(dtype) else None
            other = theirs or functools.partial(F.linear, weight=weight)
            ours = Panels.of(weight, None) if native.multiplies(weight) else other
        return choice.measure(
            f"products with [{size}, {inner}] {type_name(dtype, stored)}, {threads} threads",
            [functools.partial(ours, x) for x in xs],
            [functools.partial(other, x) for x in xs],
        )


def type_name(dtype: torch.dtype, stored: PackedFormat | None = None) -> str:
    """Returns the name of a product's types for the log, e.g. "float32" or "int8 x float32"."""
    name = str(dtype).removeprefix("torch.")
    return name if stored is None else f"{stored} x {name}"


def _onednn() -> Any:
    return torch.ops.mkldnn
