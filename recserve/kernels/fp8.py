"""Vectors in 8 bits: e4m3 numbers, and for each vector a power of two that they are multiplied by.

A number keeps four significant bits wherever it lies within 14 powers of two below the largest of
its vector. A power of two loses nothing against any other scale, because e4m3 rounds by each
number's own size; it takes one byte; and products with it are exact, so that what comes back is the
same in float32 and bfloat16, in torch and in Triton. What a vector becomes depends on it alone and
is never rewritten: copies are exact.
Source: e4m3 of arXiv 2209.05433; the power of two beside it as in OCP's microscaling formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn  # as the type of a pool: values of this kind with their exponents
TOP = (
    7  # a vector's largest number lies in [2**TOP, 2**(TOP + 1)) before rounding; e4m3 ends at 448
)
LOWEST, INFINITE = 8, 255  # exponents of float32: the least that has a scale, and inf and NaN


@dataclass(frozen=True)
class Fp8:
    """x = e4m3(codes) * 2 ** (exponents - 127).

    codes: uint8 [..., D]. exponents: uint8 [...], 0 for a vector never written, which is zero.
    Vectors that held inf or NaN come back as inf and NaN.
    """

    codes: Tensor
    exponents: Tensor

    @staticmethod
    def of(x: Tensor) -> Fp8:
        """[..., D] of any float type, rounded to nearest even."""
        wide = x.float()
        sizes = wide.abs().amax(-1).view(torch.int32) >> 23
        exponents = torch.where(sizes == INFINITE, INFINITE, sizes.clamp(min=LOWEST) - TOP)
        inverse = ((254 - exponents).clamp(min=1) << 23).view(torch.float32)
        codes = (wide * inverse[..., None]).to(FP8).view(torch.uint8)
        return Fp8(codes, exponents.to(torch.uint8))

    def __getitem__(self, index: int | slice | Tensor) -> Fp8:
        """Vectors by their leading dimensions."""
        return Fp8(self.codes[index], self.exponents[index])

    def rows(self, index: Tensor) -> Fp8:
        """The vectors at places [n] of the first dimension, which a CPU reads faster so."""
        return Fp8(self.codes.index_select(0, index), self.exponents.index_select(0, index))

    @property
    def shape(self) -> torch.Size:
        """[..., D]."""
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        """FP8."""
        return FP8

    @property
    def device(self) -> torch.device:
        """Of both parts."""
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        """As a tensor's."""
        return self.codes.is_cuda

    @property
    def is_cpu(self) -> bool:
        """As a tensor's."""
        return self.codes.is_cpu

    def float(self) -> Tensor:
        """[..., D] float32, exactly what the codes say."""
        # A sign, four bits of exponent and three of mantissa in their places of a float16 are 2**-8
        # of their number; torch's own conversion takes six times as long on a CPU.
        bits = self.codes.view(torch.int8).short()
        half = bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)
        scales = (self.exponents.int() << 23).view(torch.float32) * 2.0**8
        return half.float().mul_(scales[..., None])

    def to(self, dtype: torch.dtype) -> Tensor:
        """[..., D] of that type; exact in bfloat16."""
        return self.float().to(dtype)


Stored = Tensor | Fp8


def pool_dtype(name: str | None, own: torch.dtype) -> torch.dtype:
    """The type of a cache by its name in a configuration; None: the model's own. Raises ValueError
    for a name that is none.
    """
    if name not in (None, "fp8"):
        raise ValueError(f"kv_dtype is {name!r}; choose fp8, or None for the model's own type")
    return own if name is None else FP8


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Stored:
    """[..., D] vectors of a type, FP8 among them."""
    if dtype != FP8:
        return torch.zeros(size, dtype=dtype, device=device)
    codes = torch.zeros(size, dtype=torch.uint8, device=device)
    return Fp8(codes, torch.zeros_like(codes[..., 0]))


def vector_bytes(size: int, dtype: torch.dtype) -> int:
    """Bytes of one vector of so many numbers."""
    return size * dtype.itemsize + (dtype == FP8)


def parts(stored: Stored) -> tuple[Tensor, ...]:
    """Every tensor that holds a share of each vector; all have the same leading dimensions."""
    return (stored.codes, stored.exponents) if isinstance(stored, Fp8) else (stored,)


def put(stored: Stored, rows: Tensor, x: Tensor) -> None:
    """Vectors x [n, ..., D] to distinct rows [n] of the first dimension, as they are kept there."""
    kept = Fp8.of(x) if isinstance(stored, Fp8) else x.to(stored.dtype)
    for whole, part in zip(parts(stored), parts(kept), strict=True):
        whole.index_copy_(0, rows, part)


def clear_rows(stored: Stored, dim: int, rows: Tensor) -> None:
    """Zeros to rows [n] of a dimension."""
    for part in parts(stored):
        part.index_fill_(dim, rows, 0)


def copy_rows(stored: Stored, dim: int, source: Tensor, target: Tensor) -> None:
    """Rows `source` [n] of a dimension to rows `target` [n]; all are read before any is written."""
    for part in parts(stored):
        part.index_copy_(dim, target, part.index_select(dim, source))
