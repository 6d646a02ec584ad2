"""Rotary positions and the write to the pool in one pass over the projections.

    low' = low cos - high sin,   high' = high cos + low sin   of queries and keys; values copied

Bytes moved: the projections read once ((H + 2 K) D elements a token), queries, keys and values
written once; unfused it is three times as much. Twin: `reference.rope_write`. Source: arXiv
2104.09864, pairs (d, d + D/2) as in Hugging Face's Llama.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rope_kernel(
    qkv, cos, sin, slots, query, keys, values,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """One token, all of its heads."""
    row = tl.program_id(0).to(tl.int64)
    head, half = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_HALF)
    pair = half < HALF
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & pair[None, :]
    low_place = head[:, None] * (2 * HALF) + half[None, :]
    first = qkv + row * (HEADS + 2 * KV_HEADS) * 2 * HALF + low_place
    low = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + row * HALF + half, mask=pair, other=0.0)[None, :]
    s = tl.load(sin + row * HALF + half, mask=pair, other=0.0)[None, :]
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    new_low = tl.where(is_value, low, low * c - high * s)
    new_high = tl.where(is_value, high, high * c + low * s)
    slot = tl.load(slots + row).to(tl.int64)

    is_query = mask & (head < HEADS)[:, None]
    out = query + row * HEADS * 2 * HALF + low_place
    tl.store(out, new_low.to(query.dtype.element_ty), mask=is_query)
    tl.store(out + HALF, new_high.to(query.dtype.element_ty), mask=is_query)
    is_key = mask & (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
    out = keys + slot * KV_HEADS * 2 * HALF + low_place - HEADS * 2 * HALF
    tl.store(out, new_low.to(keys.dtype.element_ty), mask=is_key)
    tl.store(out + HALF, new_high.to(keys.dtype.element_ty), mask=is_key)
    out = values + slot * KV_HEADS * 2 * HALF + low_place - (HEADS + KV_HEADS) * 2 * HALF
    tl.store(out, new_low.to(values.dtype.element_ty), mask=mask & is_value)
    tl.store(out + HALF, new_high.to(values.dtype.element_ty), mask=mask & is_value)


def rope_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """As `reference.rope_write`."""
    rows, heads, dim = qkv.shape
    kv_heads = keys.shape[1]
    query = torch.empty(rows, heads - 2 * kv_heads, dim, dtype=qkv.dtype, device=qkv.device)
    rope_kernel[(rows,)](
        qkv.contiguous(), cos.contiguous(), sin.contiguous(), slots, query, keys, values,
        HEADS=heads - 2 * kv_heads, KV_HEADS=kv_heads, BLOCK_HEADS=triton.next_power_of_2(heads),
        HALF=dim // 2, BLOCK_HALF=triton.next_power_of_2(dim // 2),
    )  # fmt: skip
    return query
