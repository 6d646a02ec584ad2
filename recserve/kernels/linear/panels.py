"""Products with packed weights in C (products.c)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.native.native import PANEL, TYPES, N, P, compiled, library


def multiplies(weight: Tensor) -> bool:
    """Returns whether `Panels` can hold a weight [n, m]."""
    if not weight.is_cpu or weight.dtype not in TYPES or weight.ndim != 2 or weight.shape[1] % 2:
        return False
    return library() is not None


class Product(ctypes.Structure):
    """`Product` of functions.h."""

    _fields_ = [("panels", P), ("bias", P), ("scales", P), ("steps", N), ("size", N), ("halves", N)]


def in_panels(weight: Tensor, each: int) -> Tensor:
    """Returns a weight [n, m] as panels [ceil(n / PANEL), m / each, PANEL, each], zeros at the end.

    Args:
        weight: The weight, of any type.
        each: Numbers of an output that follow each other.
    """
    rows = F.pad(weight, (0, 0, 0, -weight.shape[0] % PANEL))
    return rows.view(-1, PANEL, rows.shape[1] // each, each).transpose(1, 2).contiguous()


def padded(values: Tensor | None, size: int) -> Tensor:
    """Returns values [size], or zeros for None, as [ceil(size / PANEL) * PANEL] float32."""
    whole = torch.zeros(size + -size % PANEL)
    if values is not None:
        whole[:size] = values
    return whole


def checked_rows(x: Tensor, dtype: torch.dtype, inner: int) -> Tensor:
    """Returns rows x [..., inner] contiguous. Raises ValueError for another type or width."""
    if x.dtype != dtype or x.shape[-1] != inner:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; expected {dtype} [..., {inner}]")
    return x.contiguous()


@dataclass(frozen=True)
class Panels:
    """A weight [size, m] and its bias in the layout that the C products read.

    Attributes:
        weight: [ceil(size / PANEL), m / e, PANEL, e], where e elements take four bytes. Zero rows
            pad the last panel.
        bias: [ceil(size / PANEL) * PANEL] float32.
        size: n, the number of outputs.
    """

    weight: Tensor
    bias: Tensor
    size: int

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None) -> Panels:
        """Packs a weight [n, m] and a bias [n]."""
        size = weight.shape[0]
        packed = in_panels(weight, 4 // weight.itemsize)
        return Panels(packed, padded(bias, size), size)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the activations."""
        return self.weight.dtype

    @property
    def product(self) -> Product:
        """Struct for a C function. It holds addresses, so these panels must outlive it."""
        weight = self.weight
        return Product(
            weight.data_ptr(), self.bias.data_ptr(), None, weight.shape[1], self.size, False
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x W^T + b.

        Args:
            x: [..., m] of the weight's type.

        Returns:
            [..., size].

        Raises:
            ValueError: If x has another type or width than the weight.
        """
        steps = self.weight.shape[1]
        inner = steps * self.weight.shape[3]
        x = checked_rows(x, self.weight.dtype, inner)
        out = x.new_empty(*x.shape[:-1], self.size)
        compiled().linear(
            TYPES[x.dtype],
            x.data_ptr(),
            self.weight.data_ptr(),
            self.bias.data_ptr(),
            out.data_ptr(),
            x.numel() // inner,
            steps,
            self.size,
        )
        return out
