"""Products of float32 rows with weights that are stored in float16, in C (products.c)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.linear.panels import Product, checked_rows, in_panels, padded
from recserve.kernels.native.native import compiled, library


@dataclass(frozen=True)
class Float16Panels:
    """A weight [size, m] in float16 and its bias in the layout that the C products read.

    Attributes:
        weight: [ceil(size / PANEL), m, PANEL] float16. Zero rows pad the last panel.
        bias: [ceil(size / PANEL) * PANEL] float32.
        size: n, the number of outputs.
    """

    weight: Tensor
    bias: Tensor
    size: int

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Returns whether C multiplies in place of a weight [n, m]: float32, exact in float16."""
        if not weight.is_cpu or weight.dtype != torch.float32 or weight.ndim != 2:
            return False
        if library() is None:
            return False
        half = weight.half()
        return bool(half.isfinite().all()) and torch.equal(half.float(), weight)

    @staticmethod
    def of(
        weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.float32
    ) -> Float16Panels:
        """Packs a float16 weight [n, m] and a bias [n] for float32 activations."""
        assert weight.dtype == torch.float16 and dtype == torch.float32
        size = weight.shape[0]
        packed = in_panels(weight, 1).squeeze(3)
        return Float16Panels(packed, padded(bias, size), size)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
        return torch.float32

    @property
    def product(self) -> Product:
        """Struct for a C function. It holds addresses, so these panels must outlive it."""
        weight = self.weight
        return Product(
            weight.data_ptr(), self.bias.data_ptr(), None, weight.shape[1], self.size, True
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x W^T + b.

        Args:
            x: [..., m] float32.

        Returns:
            [..., size] float32.

        Raises:
            ValueError: If x has another type or width.
        """
        inner = self.weight.shape[1]
        x = checked_rows(x, self.dtype, inner)
        out = x.new_empty(*x.shape[:-1], self.size)
        compiled().linear_halves(
            x.data_ptr(),
            self.weight.data_ptr(),
            self.bias.data_ptr(),
            out.data_ptr(),
            x.numel() // inner,
            inner,
            self.size,
        )
        return out
