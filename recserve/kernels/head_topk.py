"""The best tokens of many heads without writing their logits.

    logits[n, p] = weight[p] hidden[n, p];   of every tile of the vocabulary its k best and its
    log-sum-exp;   the k best of those, and the log-sum-exp of all

Bytes moved: the weights once per BLOCK_ROWS rows (P V E elements), and per row k of every
BLOCK_TOKENS logits instead of all of them, there and back. Twin: `reference.head_topk`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels.reference import HeadTopK

BLOCK_ROWS = 16
BLOCK_TOKENS = 128
BLOCK_SIZE = 64


@triton.jit
def head_kernel(
    hidden, weight, best, tokens, lse, rows, heads, vocabulary, weight_stride,
    K: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One tile of one head's vocabulary for one block of rows."""
    tile, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    peak = tl.max(logits, 1)
    total = tl.sum(tl.exp(logits - peak[:, None]), 1)
    tiles = tl.num_programs(0)
    tl.store(lse + place * tiles + tile, peak + tl.log(total), mask=in_rows)
    out = (place * tiles + tile) * K
    for rank in tl.static_range(K):
        peak = tl.max(logits, 1)
        # The lowest of equals; a tile with fewer than K tokens ends in -inf at no token.
        at = tl.where(logits == peak[:, None], token[None, :], 2147483647)
        winner = tl.min(at, 1)
        tl.store(best + out + rank, peak, mask=in_rows)
        tl.store(tokens + out + rank, winner, mask=in_rows)
        logits = tl.where(token[None, :] == winner[:, None], float("-inf"), logits)


def head_topk(hidden: Tensor, weight: Tensor, k: int) -> HeadTopK:
    """As `reference.head_topk`; two launches and a sort of k V / BLOCK_TOKENS numbers a row."""
    rows, heads, size = hidden.shape
    vocabulary, device = weight.shape[1], hidden.device
    tiles = triton.cdiv(vocabulary, BLOCK_TOKENS)
    best = torch.empty(rows, heads, tiles * k, device=device)
    tokens = torch.empty(rows, heads, tiles * k, dtype=torch.int32, device=device)
    lse = torch.empty(rows, heads, tiles, device=device)
    head_kernel[tiles, triton.cdiv(rows, BLOCK_ROWS), heads](
        hidden.contiguous(), weight.contiguous(), best, tokens, lse, rows, heads, vocabulary,
        vocabulary * size if weight.shape[0] > 1 else 0,
        K=k, SIZE=size, BLOCK_ROWS=BLOCK_ROWS, BLOCK_TOKENS=BLOCK_TOKENS, BLOCK_SIZE=BLOCK_SIZE,
    )  # fmt: skip
    # Tiles ascend and so do the equals of a tile: a stable sort keeps the lowest token first.
    values, order = torch.sort(best, dim=-1, descending=True, stable=True)
    chosen = tokens.gather(-1, order[..., :k]).long()
    return HeadTopK(values[..., :k], chosen, torch.logsumexp(lse, -1))
