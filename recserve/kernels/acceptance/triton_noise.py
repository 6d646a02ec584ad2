"""The Triton version of noise.py: device functions with bit-identical numbers.

Kernels that call these are launched with enable_fp_fusion=False, because a fused multiply-add
rounds once where the definition rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recserve.kernels.acceptance import noise

LANES = tl.constexpr(noise.LANES)
TILE = tl.constexpr(noise.TILE)
TARGET = tl.constexpr(noise.TARGET)
ACCEPT = tl.constexpr(noise.ACCEPT)
RESIDUAL = tl.constexpr(noise.RESIDUAL)
LN2 = tl.constexpr(noise.LN2)
FIRST, SECOND, THIRD, FOURTH = (tl.constexpr(term) for term in noise.SERIES)


@triton.jit
def words(seed, position, blocks, stream):
    """Returns four words per block. seed, position: int64 scalars. blocks: integer tensor."""
    zero = blocks.to(tl.uint32) * 0
    low = zero + position.to(tl.uint32)
    high = zero + (position >> 32).to(tl.uint32)
    return tl.philox(seed, blocks.to(tl.uint32), low, high, zero + stream)


@triton.jit
def _logarithm(x, f_of_one_minus, use):
    """Returns log(x) by the series of noise.py, or log(1 + f_of_one_minus) where `use` is true."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F400000) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    f = tl.where(use, f_of_one_minus, f)
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    tail = (((z * FOURTH + THIRD) * z + SECOND) * z + FIRST) * z
    return (tail + 2.0) * s + exponent.to(tl.float32) * LN2


@triton.jit
def exponential(word):
    """Returns exponential noise of uint32 words."""
    p = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return -_logarithm(tl.maximum(1.0 - p, 1.4901161193847656e-08), -p, p < 0.25)


@triton.jit
def gumbel(word):
    """Returns Gumbel noise of uint32 words."""
    e = exponential(word)
    return -_logarithm(e, e, e < 0)


@triton.jit
def uniform(seed, position, draw, stream):
    """Returns one number in [0, 1): entry `draw` (an integer tensor) of noise.uniform."""
    first, second, third, fourth = words(seed, position, draw // 4, stream)
    place = draw % 4
    word = tl.where(place == 0, first, tl.where(place == 1, second, third))
    word = tl.where(place == 3, fourth, word)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08
