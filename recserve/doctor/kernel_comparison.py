"""Times of C and of torch for the same work on this machine, for `recserve doctor --measure`.

The server itself measures nothing: a fixed rule says who computes (kernels/linear/products.py).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.attention.cpu import CpuTreeAttention
from recserve.kernels.attention.native import NativeTreeAttention
from recserve.kernels.attention.reference import HeadLayout
from recserve.kernels.linear import int8
from recserve.kernels.linear.int8 import Int8Weight
from recserve.kernels.linear.panels import Panels
from recserve.kernels.linear.products import (
    DecodedProduct,
    LinearFn,
    OneDnnProduct,
    onednn_multiplies,
)
from recserve.kernels.native import native
from recserve.kernels.tree import chain, root_branch
from recserve.kernels.tree_batch import Prefixes, TreeBatch

SHAPES = ((768, 256), (256, 256), (1408, 256), (256, 704))  # a decoder of 256 with 4 heads
HEADS, HEAD_DIM, LAYERS = 4, 64, 4
ROWS = (1, 128)  # a decoding step, and a prompt
PROMPT = 256  # tokens of the measured attention
ROUNDS = 5
BUDGET_S = 0.3  # for one pair of calls; at least two rounds are timed


@dataclass(frozen=True)
class Comparison:
    """Shortest times of C and of torch for the same work, one for each size of it.

    Attributes:
        c_ms: Times in C.
        torch_ms: Times in torch.
    """

    c_ms: tuple[float, ...]
    torch_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Geometric mean of torch's times divided by C's times: above 1, C is faster."""
        pairs = zip(self.c_ms, self.torch_ms, strict=True)
        return math.exp(sum(math.log(t / c) for c, t in pairs) / len(self.c_ms))

    def __str__(self) -> str:
        c, torch = (" / ".join(f"{t:.3g}" for t in ms) for ms in (self.c_ms, self.torch_ms))
        return f"C {c} ms, torch {torch} ms ({self.ratio:.2g}x)"


def compare_kernels(dtype: torch.dtype) -> dict[str, Comparison]:
    """Returns the times of a small decoder's work, by kind of work.

    Products have 1 and 128 rows. Attention is that of 56 nodes below 200 tokens, and of a prompt of
    256 tokens.

    Args:
        dtype: float32 or bfloat16. The C library must be there.
    """
    with torch.inference_mode():
        return {
            "products": _products(dtype, _plain_pair),
            "int8 products": _products(dtype, _int8_pair),
            "attention": _attention(dtype),
        }


def compare(c: list[Callable[[], object]], plain: list[Callable[[], object]]) -> Comparison:
    """Times each pair of calls in turns."""
    pairs = [_best_ms(one, other) for one, other in zip(c, plain, strict=True)]
    return Comparison(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def _best_ms(one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Returns the shortest time of each call in ms; the first round only warms up."""
    best = [math.inf, math.inf]
    began = time.perf_counter()
    for number in range(ROUNDS + 1):
        for i, call in enumerate((one, other)):
            start = time.perf_counter()
            call()
            if number:
                best[i] = min(best[i], (time.perf_counter() - start) * 1e3)
        if number >= 2 and time.perf_counter() - began > BUDGET_S:
            break
    return best[0], best[1]


def _products(
    dtype: torch.dtype, pair: Callable[[Tensor], tuple[LinearFn, LinearFn]]
) -> Comparison:
    """Compares one product with each of SHAPES after the other."""
    products = [pair(torch.ones(shape).to(dtype)) for shape in SHAPES]

    def run(which: int, rows: int) -> Callable[[], object]:
        xs = [torch.ones(rows, inner, dtype=dtype) for _, inner in SHAPES]
        return lambda: [both[which](x) for both, x in zip(products, xs, strict=True)]

    return compare([run(0, rows) for rows in ROWS], [run(1, rows) for rows in ROWS])


def _plain_pair(weight: Tensor) -> tuple[LinearFn, LinearFn]:
    if onednn_multiplies(weight.dtype):
        return Panels.of(weight, None), OneDnnProduct(weight, None)
    return Panels.of(weight, None), functools.partial(F.linear, weight=weight)


def _int8_pair(weight: Tensor) -> tuple[LinearFn, LinearFn]:
    rounded = Int8Weight.of(weight)
    decoded = DecodedProduct(rounded, None, Int8Weight.dequantize)
    return int8.panels(rounded, None, weight.dtype), decoded


def _attention(dtype: torch.dtype) -> Comparison:
    kv = torch.zeros(PROMPT, HEADS, HEAD_DIM, dtype=dtype)
    # 14 branches of 4 nodes below a prefix, and a chain in the same slots.
    tokens = torch.arange(PROMPT)
    prefix, below = tokens[:200], tokens[200:]
    branches = root_branch(below, torch.arange(0, below.shape[0] + 1, 4))
    tree = TreeBatch(branches, None, below, Prefixes.of([prefix]))
    prompt = TreeBatch(chain(tokens), None, tokens, Prefixes.of([tokens[:0]]))

    heads = HeadLayout(HEADS, 1, HEAD_DIM, dtype)

    def run(batch: TreeBatch, in_c: bool) -> Callable[[], object]:
        def attend() -> None:
            attention = NativeTreeAttention(batch) if in_c else CpuTreeAttention(batch, heads)
            for _ in range(LAYERS):
                attention(kv[: batch.num_queries], kv, kv, kv, kv)

        return attend

    assert native.library() is not None
    c, plain = ([run(batch, in_c) for batch in (tree, prompt)] for in_c in (True, False))
    return compare(c, plain)
