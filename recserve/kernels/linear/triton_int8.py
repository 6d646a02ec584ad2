"""Products of few rows with weights in 8 bits, which stay in 8 bits until they are in registers.

    out[r, i] = scales[i] sum_k x[r, k] values[i, k] + bias[i]     a program per block of outputs

Bytes moved: one per weight instead of two or four, and the rows once per program. Operations: 2 n m
per row. All whole numbers up to 127 are numbers of x's type, so only the sum is rounded, in
float32. Reference: `products.DecodedProduct`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels.linear.int8 import Int8Weight

MAX_ROWS = 64  # with more rows the product is bound by arithmetic, not by reading the weight
BLOCK_OUTPUTS = 32
BLOCK_SIZE = 128


@triton.jit(do_not_specialize=["rows"])
def int8_linear_kernel(
    x, values, scales, bias, out, rows, size,
    INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Computes one block of outputs of all rows."""
    row = tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    in_rows, in_outputs = row < rows, output < size
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], dtype=tl.float32)
    for start in range(0, INNER, BLOCK_SIZE):
        column = start + tl.arange(0, BLOCK_SIZE)
        inside = column < INNER
        some = tl.load(
            x + row[:, None] * INNER + column[None, :],
            mask=in_rows[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        weight = tl.load(
            values + output.to(tl.int64)[:, None] * INNER + column[None, :],
            mask=in_outputs[:, None] & inside[None, :], other=0,
        )  # fmt: skip
        weight = weight.to(tl.float32).to(x.dtype.element_ty)
        sums += tl.dot(some, tl.trans(weight), input_precision="tf32x3")
    sums *= tl.load(scales + output, mask=in_outputs, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * size + output[None, :], sums.to(out.dtype.element_ty),
        mask=in_rows[:, None] & in_outputs[None, :],
    )  # fmt: skip


class TritonInt8Product:
    """x W^T + b on a GPU. Up to MAX_ROWS rows read the 8 bits; more rows compute the weight first.

    Args:
        weight: The weight [n, m].
        bias: [n] of x's type, or None.
    """

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x [..., m] and returns [..., n] of x's type."""
        size, inner = self.weight.values.shape
        rows = x.numel() // inner
        if rows > MAX_ROWS:
            return F.linear(x, self.weight.dequantize(x.dtype), self.bias)
        out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
        if out.numel():
            int8_linear_kernel[(triton.cdiv(size, BLOCK_OUTPUTS),)](
                x.contiguous(), self.weight.values, self.weight.scales,
                self.weight.scales if self.bias is None else self.bias, out, rows, size,
                INNER=inner, HAS_BIAS=self.bias is not None,
                BLOCK_ROWS=max(triton.next_power_of_2(rows), 16),
                BLOCK_OUTPUTS=BLOCK_OUTPUTS, BLOCK_SIZE=BLOCK_SIZE,
            )  # fmt: skip
        return out
