"""Several hidden states of a token, each normalised by itself, side by side in one row.

    out[t, g E : (g + 1) E] = x[t, g] / sqrt(mean(x[t, g]**2) + eps) * weight[g]

Bytes moved: x read once, out written once. Twin: `reference.grouped_rms_norm`. Source: SpecFormer,
arXiv 2511.20340, hooked hidden states in front of the down projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_kernel(
    x, weight, out, eps, row_stride, group_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One hidden state of one token."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    source = x + row * row_stride + group * group_stride + column
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + group * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * scale
    place = (row * tl.num_programs(1) + group) * SIZE + column
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


def grouped_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.grouped_rms_norm`."""
    rows, groups, size = x.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(rows, groups * size, dtype=x.dtype, device=x.device)
    norm_kernel[rows, groups](
        x, weight.contiguous(), out, eps, x.stride(0), x.stride(1),
        SIZE=size, BLOCK=triton.next_power_of_2(size),
    )  # fmt: skip
    return out
