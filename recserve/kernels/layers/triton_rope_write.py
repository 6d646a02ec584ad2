"""Rotary positions and the write to the pool, in one pass over the projections.

    x = x / rms(x) * weight                                   of queries and keys, with norms
    low' = low cos - high sin,   high' = high cos + low sin   of queries and keys; values copied

Bytes moved: the projections are read once ((H + 2 K) D elements per token). Queries, keys and
values are written once; FP8 keys and values take one byte per number and one per vector. Separate
kernels move three times as much. Reference: `reference.rope_write`. Source: arXiv 2104.09864, pairs
(d, d + D/2) as in Hugging Face's Llama.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels.cache.fp8 import Fp8, Stored, parts
from recserve.kernels.cache.triton_fp8 import encoded, exponents_of, sizes
from recserve.kernels.layers.reference import HeadNorms


@triton.jit
def _store_pair(base, place, low, high, mask, HALF: tl.constexpr):
    """Stores both halves of rows at base + place, in the type of `base`."""
    tl.store(base + place, low.to(base.dtype.element_ty), mask=mask)
    tl.store(base + place + HALF, high.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _weights(query_weight, key_weight, place, mask, is_query):
    """Returns the norms' weights [heads, numbers] of queries and keys at some numbers of a head."""
    of_query = tl.load(query_weight + place, mask=mask, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + place, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query[None, :], of_key[None, :])


# Slots are often a slice of a sequence's slots, aligned or not. One compiled kernel serves both.
@triton.jit(
    do_not_specialize=["eps"],
    do_not_specialize_on_alignment=["slots", "key_exponents", "value_exponents"],
)
def rope_kernel(
    qkv, cos, sin, slots, query, keys, values, key_exponents, value_exponents,
    query_weight, key_weight, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, FP8: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotates and writes one token, all of its heads."""
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
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + eps)[:, None]
        is_q = (head < HEADS)[:, None]
        factor = _weights(query_weight, key_weight, half, pair, is_q)
        low = tl.where(is_value, low, low * scale * factor)
        factor = _weights(query_weight, key_weight, half + HALF, pair, is_q)
        high = tl.where(is_value, high, high * scale * factor)
    new_low = tl.where(is_value, low, low * c - high * s)
    new_high = tl.where(is_value, high, high * c + low * s)
    slot = tl.load(slots + row).to(tl.int64)

    is_query = mask & (head < HEADS)[:, None]
    _store_pair(query, row * HEADS * 2 * HALF + low_place, new_low, new_high, is_query, HALF)
    key_head, value_head = head - HEADS, head - HEADS - KV_HEADS
    has_key = (key_head >= 0) & (value_head < 0)
    has_value = (value_head >= 0) & (value_head < KV_HEADS)
    if FP8:
        exponents = exponents_of(tl.max(tl.maximum(sizes(new_low), sizes(new_high)), 1))
        new_low = encoded(new_low, exponents[:, None])
        new_high = encoded(new_high, exponents[:, None])
        exponents = exponents.to(tl.uint8)
        tl.store(key_exponents + slot * KV_HEADS + key_head, exponents, mask=has_key)
        tl.store(value_exponents + slot * KV_HEADS + value_head, exponents, mask=has_value)
    place = (slot * KV_HEADS + key_head)[:, None] * (2 * HALF) + half[None, :]
    _store_pair(keys, place, new_low, new_high, has_key[:, None] & pair[None, :], HALF)
    place = (slot * KV_HEADS + value_head)[:, None] * (2 * HALF) + half[None, :]
    _store_pair(values, place, new_low, new_high, has_value[:, None] & pair[None, :], HALF)


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Stored,
    values: Stored,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Runs `reference.rope_write`."""
    rows, heads, dim = qkv.shape
    kv_heads = keys.shape[1]
    query = torch.empty(rows, heads - 2 * kv_heads, dim, dtype=qkv.dtype, device=qkv.device)
    rope_kernel[(rows,)](
        qkv.contiguous(), cos.contiguous(), sin.contiguous(), slots, query,
        parts(keys)[0], parts(values)[0], parts(keys)[-1], parts(values)[-1],
        cos if norms is None else norms.query, cos if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        HEADS=heads - 2 * kv_heads, KV_HEADS=kv_heads, BLOCK_HEADS=triton.next_power_of_2(heads),
        HALF=dim // 2, BLOCK_HALF=triton.next_power_of_2(dim // 2),
        FP8=isinstance(keys, Fp8), NORM=norms is not None,
    )  # fmt: skip
    return query
