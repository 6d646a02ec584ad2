"""Products with the weights of a linear layer, packed once for serving on a CPU.

A product of few rows with a plain matrix repacks the matrix on every call, and this repacking
limits its speed. With packed weights, a row costs only the time to read the weights.

A fixed rule says who multiplies, so that equal machines give equal bits: C wherever the sources
support the processor, the type and the shape, else oneDNN through torch.

The bits of a row of a CPU product never depend on the number of rows. oneDNN keeps this promise in
float32 only: with AMX its bfloat16 sums have another order for some numbers of rows. So oneDNN
multiplies bfloat16 weights as float32 numbers, and the result is rounded. A single row has an order
of its own in float32 too, so it is computed as two. Products in plain torch, where this torch has
no oneDNN, promise nothing.

`recserve doctor --measure` compares C and torch on one machine, and `benchmarks.kernels.rule` on
each level of instruction sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels import backend
from recserve.kernels.backend import Backend, backend_of
from recserve.kernels.linear import panels
from recserve.kernels.linear.formats import FORMATS
from recserve.kernels.native import processor
from recserve.kernels.native.native import TYPES, library

LinearFn = Callable[[Tensor], Tensor]
ROWS = 64  # The layout for 64 rows is as fast for one row, and the arithmetic is the same for all.


class OneDnnProduct:
    """x W^T + b by oneDNN in float32, with W [n, m] in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.float(), ROWS)
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x [..., m] and returns [..., n] of x's type."""
        return onednn_linear(x, self.weight, self.bias)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x W^T + b [..., n] of x's type, computed by oneDNN in float32.

    Args:
        x: [..., m] of a float type.
        weight: [n, m] float32, in oneDNN's layout or as it is.
        bias: [n] float32, or None.
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    alone = len(rows) == 1
    pair = rows.expand(2, -1).contiguous() if alone else rows
    product: Tensor = torch.ops.mkldnn._linear_pointwise(pair, weight, bias, "none", [], "")
    return product[: len(rows)].to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN computes products of this type on a CPU."""
    return dtype in TYPES and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


class DecodedProduct:
    """x W^T + b in torch, on any device. Every call decodes the weight.

    Args:
        encoded: A weight [n, m] in a format.
        bias: [n] of x's type, or None.
        decode: `Codec.decode` of the format.
    """

    def __init__(
        self, encoded: Any, bias: Tensor | None, decode: Callable[[Any, torch.dtype], Tensor]
    ) -> None:
        self.encoded, self.bias, self._decode = encoded, bias, decode

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x [..., m] and returns [..., n] of x's type."""
        if x.is_cpu and onednn_multiplies(x.dtype):
            bias = None if self.bias is None else self.bias.float()
            return onednn_linear(x, self._decode(self.encoded, torch.float32), bias)
        return F.linear(x, self._decode(self.encoded, x.dtype), self.bias)


def stored_product(weight: Tensor, bias: Tensor | None, stored: str) -> LinearFn:
    """Returns the product with a weight [n, m] and a bias [n] in a format of `FORMATS`.

    For an exact format `runs_in_c` must be true. It compares all weights, so it is not asked again.
    """
    codec = FORMATS[stored].open()
    encoded = codec.encode(weight)
    if codec.panels is not None and (FORMATS[stored].exact or runs_in_c(weight, stored)):
        product: LinearFn = codec.panels(encoded, bias, weight.dtype)
    elif codec.triton is not None and backend_of(weight) is Backend.TRITON:
        product = resolve_name(codec.triton)(encoded, bias)
    else:
        product = DecodedProduct(encoded, bias, codec.decode)
    return product


def runs_in_c(weight: Tensor, stored: str | None = None) -> bool:
    """Returns whether the product with a weight runs in C, by the rule of this module.

    Args:
        weight: [n, m] of the activations' type, before it is stored in another format.
        stored: Format of `FORMATS` in which it is stored. None means its own type.
    """
    if not backend.c_is_allowed():
        return False
    if stored is not None:
        supports = FORMATS[stored].open().c_supports
        return supports is not None and supports(weight)
    return panels.multiplies(weight)


def fastest_dtype(candidates: Sequence[torch.dtype]) -> torch.dtype:
    """Returns the type in which products are fastest on this CPU.

    That is bfloat16 where C has an instruction for it, else float32.

    Args:
        candidates: Types to choose from. The first is returned if neither is among them.
    """
    wanted = [torch.float32]
    if processor.has_bfloat16_products() and backend.c_is_allowed() and library() is not None:
        wanted.insert(0, torch.bfloat16)
    return next((dtype for dtype in wanted if dtype in candidates), candidates[0])


def type_name(dtype: torch.dtype, stored: str | None = None) -> str:
    """Returns the name of a product's types for the log, e.g. "float32" or "int8 x float32"."""
    name = str(dtype).removeprefix("torch.")
    return name if stored is None else f"{stored} x {name}"
