"""Vectors in 8 bits: e4m3 numbers and one power of two per vector that scales them.

A number has four significant bits if it lies within 14 powers of two below the largest number of
its vector. A power-of-two scale is as accurate as any other, because e4m3 rounds relative to each
number's own size. It takes one byte. Products with it are exact, so decoding gives the same numbers
in float32 and bfloat16, in torch and in Triton. The code of a vector depends on this vector alone
and is never rewritten, so copies are exact.
Source: e4m3 of arXiv 2209.05433; power-of-two scales as in the OCP microscaling formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn  # as the dtype of a pool: codes of this type with their exponents
# Before rounding, the largest number of a vector lies in [2**TOP, 2**(TOP + 1)). e4m3 ends at 448.
TOP = 7
LOWEST, INFINITE = 8, 255  # float32 exponents: the lowest that has a scale, and that of inf and NaN


@dataclass(frozen=True)
class Fp8:
    """Vectors x = e4m3(codes) * 2 ** (exponents - 127).

    Vectors that held inf or NaN decode to inf and NaN.

    Attributes:
        codes: [..., D] uint8.
        exponents: [...] uint8. 0 marks a vector that was never written, which is zero.
    """

    codes: Tensor
    exponents: Tensor

    @staticmethod
    def of(x: Tensor) -> Fp8:
        """Encodes vectors [..., D] of any float type, rounded to nearest even."""
        wide = x.float()
        sizes = wide.abs().amax(-1).view(torch.int32) >> 23
        exponents = torch.where(sizes == INFINITE, INFINITE, sizes.clamp(min=LOWEST) - TOP)
        inverse = ((254 - exponents).clamp(min=1) << 23).view(torch.float32)
        codes = (wide * inverse[..., None]).to(FP8).view(torch.uint8)
        return Fp8(codes, exponents.to(torch.uint8))

    def __getitem__(self, index: int | slice | Tensor) -> Fp8:
        """Returns the vectors at an index of the leading dimensions."""
        return Fp8(self.codes[index], self.exponents[index])

    def rows(self, index: Tensor) -> Fp8:
        """Returns the vectors at rows [n] of the first dimension; on a CPU faster than indexing."""
        return Fp8(self.codes.index_select(0, index), self.exponents.index_select(0, index))

    @property
    def shape(self) -> torch.Size:
        """Shape of the codes, [..., D]."""
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        """FP8 as a marker; what is stored are uint8 codes and exponents."""
        return FP8

    @property
    def device(self) -> torch.device:
        """Device of both tensors."""
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        """Whether the tensors are on a CUDA device."""
        return self.codes.is_cuda

    @property
    def is_cpu(self) -> bool:
        """Whether the tensors are on a CPU."""
        return self.codes.is_cpu

    def float(self) -> Tensor:
        """Decodes exactly to float32 [..., D]."""
        # The sign, exponent (4 bits) and mantissa (3 bits) of e4m3, moved to their places in a
        # float16, give the number times 2**-8. torch's own conversion takes six times as long on a
        # CPU.
        bits = self.codes.view(torch.int8).short()
        half = bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)
        scales = (self.exponents.int() << 23).view(torch.float32) * 2.0**8
        return half.float().mul_(scales[..., None])

    def to(self, dtype: torch.dtype) -> Tensor:
        """Decodes to a dtype [..., D]; exact in bfloat16."""
        return self.float().to(dtype)


Stored = Tensor | Fp8


def pool_dtype(name: str | None, own: torch.dtype) -> torch.dtype:
    """Returns the type of a KV cache by its name in a configuration.

    Args:
        name: "fp8", or None for the model's own type.
        own: The model's own type.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in (None, "fp8"):
        raise ValueError(f"kv_dtype is {name!r}; choose fp8, or None for the model's own type")
    return own if name is None else FP8


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Stored:
    """Returns zero vectors of this size [..., D] and type, which may be FP8."""
    if dtype != FP8:
        return torch.zeros(size, dtype=dtype, device=device)
    codes = torch.zeros(size, dtype=torch.uint8, device=device)
    return Fp8(codes, torch.zeros_like(codes[..., 0]))


def vector_bytes(size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one vector of `size` numbers, its exponent included."""
    return size * dtype.itemsize + (dtype == FP8)


def parts(stored: Stored) -> tuple[Tensor, ...]:
    """Returns the tensors that together hold the vectors; all have the same leading dimensions."""
    return (stored.codes, stored.exponents) if isinstance(stored, Fp8) else (stored,)


def put(stored: Stored, rows: Tensor, x: Tensor) -> None:
    """Writes vectors x [n, ..., D] to distinct rows [n] of the first dimension."""
    kept = Fp8.of(x) if isinstance(stored, Fp8) else x.to(stored.dtype)
    for whole, part in zip(parts(stored), parts(kept), strict=True):
        whole.index_copy_(0, rows, part)


def clear_rows(stored: Stored, dim: int, rows: Tensor) -> None:
    """Writes zeros to rows [n] of a dimension."""
    for part in parts(stored):
        part.index_fill_(dim, rows, 0)


def copy_rows(stored: Stored, dim: int, source: Tensor, target: Tensor) -> None:
    """Copies rows `source` [n] to rows `target` [n] of a dimension; reads precede writes."""
    for part in parts(stored):
        part.index_copy_(dim, target, part.index_select(dim, source))
