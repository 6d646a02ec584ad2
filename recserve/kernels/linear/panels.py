"""Products with packed weights in C, in every format that C multiplies (products.c, int8.c)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.native.native import PANEL, TYPES, N, P, get_library, library

# What panels hold: numbers of the activations' type, or of one of these.
STORED = {torch.float16: 1, torch.int8: 2}


def c_multiplies(weight: Tensor) -> bool:
    """Returns whether C multiplies activations of the type and device of a weight [n, m]."""
    if not weight.is_cpu or weight.dtype not in TYPES or weight.ndim != 2:
        return False
    return library() is not None


def multiplies(weight: Tensor) -> bool:
    """Returns whether C multiplies with a weight [n, m] of the activations' type."""
    return c_multiplies(weight) and weight.shape[1] % 2 == 0


class LinearStruct(ctypes.Structure):
    """`Product` of functions.h."""

    _fields_ = [("panels", P), ("bias", P), ("scales", P), ("inner", N), ("size", N), ("stored", N)]


@dataclass(frozen=True)
class Panels:
    """A weight [size, inner] and its bias in the layout that the C products read.

    Attributes:
        weight: [ceil(size / PANEL), inner / e, PANEL, e], where e numbers of an output follow each
            other. Zero rows pad the last panel. The type is that of the activations, float16 for
            float32 activations, or int8.
        bias: [ceil(size / PANEL) * PANEL] float32.
        scales: The same shape, for int8. None for other types.
        size: n, the number of outputs.
        dtype: Type of the activations.
    """

    weight: Tensor
    bias: Tensor
    scales: Tensor | None
    size: int
    dtype: torch.dtype

    @staticmethod
    def of(
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
        scales: Tensor | None = None,
    ) -> Panels:
        """Packs a weight.

        Args:
            weight: [n, m] of the activations' type, float16 or int8.
            bias: [n], or None.
            dtype: Type of the activations. None means the type of the weight.
            scales: [n] float32, of each output of an int8 weight.
        """
        size, inner = weight.shape
        dtype = dtype or weight.dtype
        each = 4 // weight.itemsize
        if weight.dtype == torch.int8:
            each = get_library().int8_depth(TYPES[dtype], inner)
        elif weight.dtype in STORED:
            each = 1
        rows = F.pad(weight, (0, 0, 0, -size % PANEL))
        packed = rows.view(-1, PANEL, inner // each, each).transpose(1, 2).contiguous()
        whole = None if scales is None else _whole_panels(scales, size)
        return Panels(packed, _whole_panels(bias, size), whole, size, dtype)

    @property
    def inner(self) -> int:
        """Returns m, the width of the inputs."""
        return self.weight.shape[1] * self.weight.shape[3]

    @property
    def product(self) -> LinearStruct:
        """Struct for a C function. It holds addresses, so these panels must outlive it."""
        return LinearStruct(
            self.weight.data_ptr(),
            self.bias.data_ptr(),
            None if self.scales is None else self.scales.data_ptr(),
            self.inner,
            self.size,
            STORED.get(self.weight.dtype, 0),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x W^T + b, summed in float32.

        Args:
            x: [..., m] of `dtype`.

        Returns:
            [..., size] of the same type.

        Raises:
            ValueError: If x has another type or width.
        """
        inner = self.inner
        if x.dtype != self.dtype or x.shape[-1] != inner:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}; expected {self.dtype} [..., {inner}]"
            )
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.size)
        get_library().linear(
            TYPES[x.dtype],
            ctypes.byref(self.product),
            x.data_ptr(),
            out.data_ptr(),
            x.numel() // inner,
        )
        return out


def _whole_panels(values: Tensor | None, size: int) -> Tensor:
    """Returns values [size], or zeros for None, as [ceil(size / PANEL) * PANEL] float32."""
    whole = torch.zeros(size + -size % PANEL)
    if values is not None:
        whole[:size] = values
    return whole
