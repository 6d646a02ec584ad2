"""Products with the weights of a linear layer, packed once for serving on a CPU.

A product of few rows with a plain matrix repacks the matrix on every call, and this repacking
limits its speed. With packed weights, a row costs only the time to read the weights.

A fixed rule says who multiplies, so that equal machines give equal bits: C wherever the sources
support the processor, the type and the shape, else torch. The one exception is bfloat16 on a
processor with AMX, where oneDNN multiplies, because C was never measured against AMX.
`recserve doctor --measure` compares both on one machine, and `benchmarks.kernels.rule` on each
level of instruction sets.
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
from recserve.kernels.native.native import TYPES

Product = Callable[[Tensor], Tensor]
ROWS = 64  # The layout for 64 rows is as fast for one row, and the arithmetic is the same for all.


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


class DecodedProduct:
    """x W^T + b in plain torch, on any device. Every call decodes the weight.

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
        return F.linear(x, self._decode(self.encoded, x.dtype), self.bias)


def stored_product(weight: Tensor, bias: Tensor | None, stored: str) -> Product:
    """Returns the product with a weight [n, m] and a bias [n] in a format of `FORMATS`.

    For an exact format `runs_in_c` must be true. It compares all weights, so it is not asked again.
    """
    codec = FORMATS[stored].open()
    encoded = codec.encode(weight)
    if codec.panels is not None and (FORMATS[stored].exact or runs_in_c(weight, stored)):
        product: Product = codec.panels(encoded, bias, weight.dtype)
    elif codec.triton is not None and backend_of(weight) is Backend.TRITON:
        product = resolve_name(codec.triton)(encoded, bias)
    else:
        product = DecodedProduct(encoded, bias, codec.decode)
    return product


def runs_in_c(weight: Tensor, stored: str | None = None) -> bool:
    """Returns whether the product with a weight runs in C, by the rule of this module.

    `RECSERVE_KERNELS` set to `c` leaves out the exception.

    Args:
        weight: [n, m] of the activations' type, before it is stored in another format.
        stored: Format of `FORMATS` in which it is stored. None means its own type.
    """
    if not backend.c_is_allowed():
        return False
    if stored is not None:
        supports = FORMATS[stored].open().c_supports
        return supports is not None and supports(weight)
    in_amx = weight.dtype == torch.bfloat16 and processor.has_amx() and onednn_packs(weight.dtype)
    return panels.multiplies(weight) and (backend.FORCED == "c" or not in_amx)


def fastest_dtype(candidates: Sequence[torch.dtype]) -> torch.dtype:
    """Returns the type in which products are fastest on this CPU.

    That is bfloat16 where the processor has an instruction for it, else float32.

    Args:
        candidates: Types to choose from. The first is returned if neither is among them.
    """
    wanted = [torch.float32]
    if processor.has_bfloat16_products():
        wanted.insert(0, torch.bfloat16)
    return next((dtype for dtype in wanted if dtype in candidates), candidates[0])


def type_name(dtype: torch.dtype, stored: str | None = None) -> str:
    """Returns the name of a product's types for the log, e.g. "float32" or "int8 x float32"."""
    name = str(dtype).removeprefix("torch.")
    return name if stored is None else f"{stored} x {name}"


def _onednn() -> Any:
    return torch.ops.mkldnn
