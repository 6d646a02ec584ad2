"""Masks of allowed tokens in Triton: each program applies a block of one row's mask.

    logits[i, t] = -inf   where rows[i] >= 0 and bit t % 32 of bits[rows[i], t // 32] is 0

Bytes moved: V / 8 of bits for each row with a mask, and what is banned.
Reference: `masks.ban_masked_reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit(do_not_specialize_on_alignment=["rows"])
def ban_kernel(logits, bits, rows, vocabulary, words, BLOCK: tl.constexpr):
    """Bans the forbidden tokens of one block of the vocabulary in one row."""
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < vocabulary) & (row >= 0)
    word = tl.load(bits + row * words + token // 32, mask=inside, other=-1)
    banned = inside & (((word >> (token % 32)) & 1) == 0)
    where = logits + number * vocabulary + token
    tl.store(where, tl.full([BLOCK], float("-inf"), logits.dtype.element_ty), mask=banned)


def ban_masked(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """Runs `masks.ban_masked_reference`."""
    count, vocabulary = logits.shape
    if bits.shape[0]:
        ban_kernel[count, triton.cdiv(vocabulary, BLOCK)](
            logits, bits, rows, vocabulary, bits.shape[1], BLOCK=BLOCK
        )
