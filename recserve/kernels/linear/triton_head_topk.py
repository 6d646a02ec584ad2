"""The best tokens of many heads, without writing their logits.

    logits[n, p] = weight[p] hidden[n, p];   the k best of every tile of the vocabulary;
    the k best of those

Bytes moved: the weights once (P V E elements). Heads that share one matrix become rows of one head.
Blocks of rows that need the same tile run at the same time and find it in L2. Per row, k of every
BLOCK_TOKENS logits are written and read. They are keys that order by logit, then by the lower
token. Reference: `head_topk.head_topk_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels.linear.head_topk import HeadTopK

MAX_ROWS = 64  # of a block; more rows would halve the tiles in flight
BLOCK_TOKENS = 128
BLOCK_SIZE = 64


@triton.jit(do_not_specialize=["rows"])
def head_kernel(
    hidden, weight, best, rows, heads, vocabulary, weight_stride,
    K: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Finds the best tokens of one tile of one head's vocabulary for one block of rows."""
    block, tile, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    in_rows, in_tokens = row < rows, token < vocabulary
    place = row.to(tl.int64) * heads + head
    logits = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], dtype=tl.float32)
    for start in range(0, SIZE, BLOCK_SIZE):
        column = start + tl.arange(0, BLOCK_SIZE)
        inside = column < SIZE
        x = tl.load(
            hidden + place[:, None] * SIZE + column[None, :],
            mask=in_rows[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            weight + head.to(tl.int64) * weight_stride
            + token.to(tl.int64)[:, None] * SIZE + column[None, :],
            mask=in_tokens[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        logits += tl.dot(x, tl.trans(w), input_precision="tf32x3")
    logits = tl.where(in_tokens[None, :], logits, float("-inf"))
    out = (place * tl.num_programs(1) + tile) * K
    for rank in tl.static_range(K):
        peak = tl.max(logits, 1)
        # Ties go to the lowest token. A tile with fewer than K tokens ends in -inf without a
        # token.
        at = tl.where(logits == peak[:, None], token[None, :], 2147483647)
        winner = tl.min(at, 1)
        bits = (peak + 0.0).to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = (ordered.to(tl.int64) << 32) | (4294967295 - winner.to(tl.int64))
        tl.store(best + out + rank, key, mask=in_rows)
        logits = tl.where(token[None, :] == winner[:, None], float("-inf"), logits)


def head_topk(hidden: Tensor, weight: Tensor, k: int) -> HeadTopK:
    """Runs `head_topk_reference` in one launch and a top-k of k V / BLOCK_TOKENS keys per row."""
    shape, size = hidden.shape[:2], hidden.shape[2]
    hidden = hidden.contiguous().view(-1, weight.shape[0], size)
    rows, heads = hidden.shape[:2]
    vocabulary, device = weight.shape[1], hidden.device
    tiles = triton.cdiv(vocabulary, BLOCK_TOKENS)
    block_rows = max(min(triton.next_power_of_2(rows), MAX_ROWS), 16)
    best = torch.empty(*shape, tiles * k, dtype=torch.int64, device=device)
    head_kernel[triton.cdiv(rows, block_rows), tiles, heads](
        hidden, weight.contiguous(), best, rows, heads, vocabulary, vocabulary * size,
        K=k, SIZE=size, BLOCK_ROWS=block_rows, BLOCK_TOKENS=BLOCK_TOKENS, BLOCK_SIZE=BLOCK_SIZE,
    )  # fmt: skip
    keys = best.topk(k, dim=-1).values
    ordered = (keys >> 32).int()
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return HeadTopK(values, 4294967295 - (keys & 4294967295))
