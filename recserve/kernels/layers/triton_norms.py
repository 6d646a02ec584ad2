"""Residual sum with RMSNorm, and SwiGLU's gate: what lies between the products of a layer.

    s = x + y,   out = s / rms(s) * weight            one program per row
    out = gate sigmoid(gate) up                       one program per row and block of numbers

Bytes moved per row of E numbers: two read and two written, instead of three each in two launches;
of the gate two read and one written, instead of four and two. Sums and products are in float32, and
s is rounded to x's type before its norm, as the separate operators do. References: `x + y` with
`F.rms_norm`, and `F.silu(gate) * up`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of a program of the gate


@triton.jit(do_not_specialize=["eps"])
def add_norm_kernel(x, y, weight, total, out, eps, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Adds and normalises one row."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_SIZE)
    mask = place < SIZE
    first = tl.load(x + row * SIZE + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(y + row * SIZE + place, mask=mask, other=0.0).to(tl.float32)
    rounded = (first + second).to(total.dtype.element_ty)
    tl.store(total + row * SIZE + place, rounded, mask=mask)
    wide = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    factor = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + place, (wide * scale * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Gates one block of numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = place < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + place, mask=mask, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(out + row * SIZE + place, gated.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Runs `operators.add_rms_norm` in one launch."""
    x, y = x.contiguous(), y.contiguous()
    total, out, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    if x.numel():
        add_norm_kernel[(x.numel() // size,)](
            x, y, weight, total, out, eps, SIZE=size, BLOCK_SIZE=triton.next_power_of_2(size)
        )
    return total, out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Runs `operators.silu_mul` in one launch."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        gate_kernel[out.numel() // size, triton.cdiv(size, BLOCK)](
            gate_up, out, SIZE=size, BLOCK_SIZE=min(BLOCK, triton.next_power_of_2(size))
        )
    return out
