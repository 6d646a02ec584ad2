"""Noise in Triton, with the bits of noise.py: device functions, and kernels of Gumbel noise.

    out[i, j] = gumbel(seed_i, position_i, token)   token: j, or tokens[i, j]

Bytes moved: the noise is written (4 for each number), and chosen tokens are read (8). In torch the
same noise takes over 180 launches. Kernels that call the device functions are launched with
enable_fp_fusion=False, because a fused multiply-add rounds once where the definition rounds twice.
References: `noise.gumbel_reference` and `noise.gumbel_of_tokens_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels.acceptance import noise

LANES = tl.constexpr(noise.LANES)
TILE = tl.constexpr(noise.TILE)
TARGET = tl.constexpr(noise.TARGET)
ACCEPT = tl.constexpr(noise.ACCEPT)
RESIDUAL = tl.constexpr(noise.RESIDUAL)
LN2 = tl.constexpr(noise.LN2)
FIRST, SECOND, THIRD, FOURTH = (tl.constexpr(term) for term in noise.SERIES)
BLOCK_TOKENS = 128  # chosen tokens of one program
# What differs from call to call is not specialised, so one compiled kernel serves all calls.
NUMBERS = ["stream", "num_tokens"]
TABLES = ["seeds", "positions", "tokens"]


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
def exponential_of_words(word):
    """Returns exponential noise of uint32 words."""
    p = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return -_logarithm(tl.maximum(1.0 - p, 1.4901161193847656e-08), -p, p < 0.25)


@triton.jit
def gumbel_of_words(word):
    """Returns Gumbel noise of uint32 words."""
    e = exponential_of_words(word)
    return -_logarithm(e, e, e < 0)


@triton.jit
def word_at(seed, position, blocks, place, stream):
    """Returns one of the four words of each block, number `place` of 0 : 4."""
    first, second, third, fourth = words(seed, position, blocks, stream)
    word = tl.where(place == 0, first, tl.where(place == 1, second, third))
    return tl.where(place == 3, fourth, word)


@triton.jit
def uniform(seed, position, draw, stream):
    """Returns one number in [0, 1): entry `draw` (an integer tensor) of noise.uniform."""
    word = word_at(seed, position, draw // 4, draw % 4, stream)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TABLES)
def all_tokens_kernel(
    seeds, positions, out, vocabulary, stream, LANES: tl.constexpr, TILE: tl.constexpr
):
    """Computes the noise of one tile of the vocabulary in one row."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, LANES)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    drawn = words(seed, position, tile * LANES + lane, stream)
    for word in tl.static_range(4):
        token = tile * TILE + word * LANES + lane
        value = gumbel_of_words(drawn[word])
        tl.store(out + row * vocabulary + token, value, mask=token < vocabulary)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TABLES)
def tokens_kernel(
    seeds, positions, tokens, out, num_tokens, stream,
    LANES: tl.constexpr, TILE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Computes the noise of some chosen tokens in one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside, where = column < num_tokens, row * num_tokens + column
    token = tl.load(tokens + where, mask=inside, other=0)
    blocks, place = token // TILE * LANES + token % LANES, token // LANES % 4
    word = word_at(tl.load(seeds + row), tl.load(positions + row), blocks, place, stream)
    tl.store(out + where, gumbel_of_words(word), mask=inside)


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int, stream: int = noise.TARGET) -> Tensor:
    """Runs `noise.gumbel_reference` in one launch."""
    rows = seeds.shape[0]
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=seeds.device)
    all_tokens_kernel[rows, triton.cdiv(vocabulary, noise.TILE)](
        seeds.contiguous(), positions.contiguous(), out, vocabulary, stream,
        LANES=noise.LANES, TILE=noise.TILE, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def gumbel_of_tokens(
    seeds: Tensor, positions: Tensor, tokens: Tensor, stream: int = noise.TARGET
) -> Tensor:
    """Runs `noise.gumbel_of_tokens_reference` in one launch."""
    rows, num_tokens = tokens.shape
    out = torch.empty(rows, num_tokens, dtype=torch.float32, device=tokens.device)
    tokens_kernel[rows, triton.cdiv(num_tokens, BLOCK_TOKENS)](
        seeds.contiguous(), positions.contiguous(), tokens.contiguous(), out, num_tokens, stream,
        LANES=noise.LANES, TILE=noise.TILE, BLOCK_TOKENS=BLOCK_TOKENS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
