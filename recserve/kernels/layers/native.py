"""Norms, RoPE and the gate in C (layers.c).

torch composes a norm of seven operators and RoPE of eight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.cache.fp8 import Stored
from recserve.kernels.layers.reference import HeadNorms
from recserve.kernels.native.native import TYPES, get_library


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight over the last dimension; x [..., E], weight [E] of x's type."""
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    get_library().rms_norm(
        TYPES[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.numel() // size,
        size,
        eps,
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up [..., n] of a tensor [..., 2 n] that holds the gate first."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    get_library().silu_mul(
        TYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size
    )
    return out


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Stored,
    values: Stored,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Runs `reference.rope_write` in C. D is a multiple of 2 * LANES; all tensors have one type."""
    assert isinstance(keys, Tensor) and isinstance(values, Tensor)
    rows, all_heads, dim = qkv.shape
    kv_heads = keys.shape[1]
    heads = all_heads - 2 * kv_heads
    if norms is not None:
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        query = rms_norm(query, norms.query, norms.eps)
        qkv = torch.cat([query, rms_norm(key, norms.key, norms.eps), value], dim=1)
    query = qkv.new_empty(rows, heads, dim)
    qkv, cos, sin, slots = (x.contiguous() for x in (qkv, cos, sin, slots))
    get_library().rope_write(
        TYPES[qkv.dtype],
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        query.data_ptr(),
        rows,
        heads,
        kv_heads,
        dim,
    )
    return query
