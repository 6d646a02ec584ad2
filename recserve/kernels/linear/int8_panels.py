"""Products with 8-bit weights in C (int8.c)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.linear.int8 import Int8Weight
from recserve.kernels.linear.panels import Product, checked_rows, in_panels, padded
from recserve.kernels.native.native import TYPES, compiled, library


@dataclass(frozen=True)
class Int8Panels:
    """An 8-bit weight [size, m] and its bias in the layout that the C products read.

    Attributes:
        weight: [ceil(size / PANEL), m / d, PANEL, d] int8, where d depends on the processor and the
            activations. Zero rows pad the last panel.
        scales: [ceil(size / PANEL) * PANEL] float32.
        bias: [ceil(size / PANEL) * PANEL] float32.
        size: n, the number of outputs.
        dtype: Type of the activations.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor
    size: int
    dtype: torch.dtype

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Returns whether C multiplies activations of this weight's device and type with 8 bits."""
        if not weight.is_cpu or weight.dtype not in TYPES or weight.ndim != 2:
            return False
        return library() is not None

    @staticmethod
    def of(weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> Int8Panels:
        """Packs a weight [n, m] and a bias [n] for activations of a type of `TYPES`."""
        size, inner = weight.values.shape
        depth = compiled().int8_depth(TYPES[dtype], inner)
        packed = in_panels(weight.values, depth)
        scales = padded(weight.scales, size)
        return Int8Panels(packed, scales, padded(bias, size), size, dtype)

    @property
    def product(self) -> Product:
        """Struct for a C function. It holds addresses, so these panels must outlive it."""
        return Product(
            self.weight.data_ptr(),
            self.bias.data_ptr(),
            self.scales.data_ptr(),
            self.inner,
            self.size,
            False,
        )

    @property
    def inner(self) -> int:
        """Returns m, the width of the inputs."""
        return self.weight.shape[1] * self.weight.shape[3]

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
        x = checked_rows(x, self.dtype, inner)
        out = x.new_empty(*x.shape[:-1], self.size)
        compiled().linear_int8(
            TYPES[x.dtype],
            x.data_ptr(),
            self.weight.data_ptr(),
            self.scales.data_ptr(),
            self.bias.data_ptr(),
            out.data_ptr(),
            x.numel() // inner,
            inner,
            self.size,
        )
        return out
