"""RoPE and the write of keys and values, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.cache.fp8 import Stored, put


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms of queries and keys before they are rotated (QK norm).

    Attributes:
        query: [D] weight of the queries' norm.
        key: [D] weight of the keys' norm.
        eps: Added to the mean square.
    """

    query: Tensor
    key: Tensor
    eps: float


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Stored,
    values: Stored,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotates queries and keys by their positions, and writes keys and values to their slots.

    Args:
        qkv: [T, H + 2 K, D], queries first.
        cos: [T, D / 2] float32.
        sin: [T, D / 2] float32.
        slots: [T], distinct.
        keys: [slots, K, D], one layer of the pool.
        values: Same shape as the keys.
        norms: Norms of queries and keys. None means that they have none.

    Returns:
        The rotated queries [T, H, D].
    """
    query, key, value = rotate(qkv, cos, sin, keys.shape[1], norms)
    put(keys, slots, key)
    put(values, slots, value)
    return query


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits projections as for `rope_write`, and rotates queries and keys by their positions.

    Computes in float32 and rounds once.

    Returns:
        Queries [T, H, D] in the type of qkv, keys [T, K, D] in float32, and values [T, K, D].
    """
    turned, value = torch.split(qkv, [qkv.shape[1] - kv_heads, kv_heads], dim=1)
    turned = turned.float()
    if norms is not None:
        heads = turned.shape[1] - kv_heads
        weights = torch.cat([norms.query.expand(heads, -1), norms.key.expand(kv_heads, -1)])
        turned = F.rms_norm(turned, turned.shape[-1:], eps=norms.eps) * weights.float()
    low, high = turned.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    query, key = torch.split(turned, [turned.shape[1] - kv_heads, kv_heads], dim=1)
    return query.to(qkv.dtype), key, value
