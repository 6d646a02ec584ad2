"""How a layer attends: the one seam between the networks and the engine.

A trunk computes queries, keys and values and hands them to an `Attend`. In serving that is
`PagedAttention`, over the pages of the engine; in training it is `DenseAttention`. The trunk cannot
tell them apart. Rotary positions are here too, because serving turns and writes keys in one pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.cpu.cpu_attention import CpuTreeAttention
from recserve.kernels.cpu.cpu_plan import Form
from recserve.kernels.cpu.native_layers import NativeLayers
from recserve.kernels.fp8_attention import attention_to
from recserve.kernels.paged_kv import KVPool, TreeBatch
from recserve.kernels.reference import SOFTMAX, Activation
from recserve.models.config import DecoderConfig


class Attend(Protocol):
    """Attention of one layer over whatever its owner keeps."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [..., T, H, D], key and value [..., T, K, D], RoPE applied -> [..., T, H, D]."""
        ...


@dataclass(frozen=True)
class DenseAttention:
    """Softmax attention inside one padded batch, no cache: training, and the plain path of tests.

    mask: [N, N] or [B, 1, N, N] bool, true where row sees column; None: causal. dropout:
    probability.
    """

    mask: Tensor | None = None
    dropout: float = 0.0

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, N, H, D], key and value [B, N, K, D] -> [B, N, H, D]."""
        groups = query.shape[-2] // key.shape[-2]
        if groups > 1:
            key = key.repeat_interleave(groups, dim=-2)
            value = value.repeat_interleave(groups, dim=-2)
        query, key, value = (x.transpose(-3, -2) for x in (query, key, value))
        if query.device.type == "cpu" and value.dtype == torch.bfloat16 and not self.dropout:
            return _plain_attention(query, key, value, self.mask).transpose(-3, -2)
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self.mask,
            dropout_p=self.dropout,
            is_causal=self.mask is None,
        )
        return out.transpose(-3, -2)


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """What scaled_dot_product_attention computes, whose backward in bf16 is slow on CPUs."""
    if mask is None:
        size = query.shape[-2]
        mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    bias = torch.zeros_like(mask, dtype=value.dtype).masked_fill_(~mask, -torch.inf)
    scores = (query * query.shape[-1] ** -0.5).to(value.dtype) @ key.to(value.dtype).mT
    mixed: Tensor = (scores + bias).softmax(-1).to(value.dtype) @ value
    return mixed


@dataclass(frozen=True)
class DenseSiluAttention:
    """silu(q k / sqrt(D)) / normalizer without softmax (HSTU, MTGR), inside one padded batch.

    mask: [N, N] or [B, 1, N, N] bool, true where row sees column.
    normalizer: a constant, so that a row does not depend on how many others there are.
    """

    mask: Tensor
    normalizer: float

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value [B, N, H, D] -> [B, N, H, D]."""
        scores = torch.einsum("bnhd,bmhd->bhnm", query, key) * query.shape[-1] ** -0.5
        weights = F.silu(scores) * (self.mask / self.normalizer)
        return torch.einsum("bhnm,bmhd->bnhd", weights, value)


class Rope:
    """Cosines and sines of rotary positions, computed once per forward and shared by all layers.

    cos, sin [..., T, D/2] float32. Pairs are (d, d + D/2), the convention of Hugging Face's Llama.
    Source: arXiv 2104.09864.
    """

    def __init__(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> None:
        angles = positions[..., None].float() * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()
        self._dtype = dtype

    @cached_property
    def _turns(self) -> tuple[Tensor, Tensor]:
        cos, sin = (x[..., None, :].to(self._dtype) for x in (self.cos, self.sin))
        return cos, sin

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., T, H, D] -> the same shape, turned by its position."""
        cos, sin = self._turns
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """[D/2] float32 radians per position, on the CPU, whatever the defaults of torch are.

    Source of the scaling: Llama 3.1 (arXiv 2407.21783, section 3.4.2, and its published weights).
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    exponents = pairs / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class PagedAttention:
    """An `Attend` that writes the keys and values of the computed nodes to their slots.

    turns: whether it wants projections as they come, to turn and write them in one pass.
    """

    def __init__(
        self,
        batch: TreeBatch,
        pool: KVPool,
        activation: Activation = SOFTMAX,
        attention: dispatch.BatchAttention = dispatch.tree_attention,
    ) -> None:
        """attention: how the nodes of a batch attend."""
        attention = attention_to(pool.keys, attention)
        self.pool = pool
        self.slots = batch.query_slots()
        self.turns = type(pool) is KVPool and dispatch.turns(pool.keys)
        self._softmax = activation.normalizer is None
        self._attention = attention(batch, activation)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As Attend: query [Tq, H, D], key and value [Tq, K, D] -> [Tq, H, D]."""
        pool = self.pool
        pool.write(layer, self.slots, key, value)
        return self._attention(query, key, value, pool.keys[layer], pool.values[layer])

    def of_projections(self, layer: int, qkv: Tensor, rope: Rope) -> Tensor:
        """The same from qkv [Tq, H + 2 K, D], queries first, before RoPE; where `turns`."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        query = dispatch.rope_write(qkv, rope.cos, rope.sin, self.slots, keys, values)
        # Kernels read the computed nodes' own keys and values from the pool.
        return self._attention(query, query, query, keys, values)

    def through(self, layers: NativeLayers, x: Tensor, rope: Rope, count: int) -> Tensor | None:
        """x [Tq, E] through the first `count` layers in one call, where those are all normed too;
        None where they go one by one.
        """
        keys, values = self.pool.keys, self.pool.values
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            return None
        if not self.turns or not isinstance(self._attention, CpuTreeAttention) or x.ndim != 2:
            return None
        s = layers.shape
        form = Form(s.kv_heads, s.heads // s.kv_heads, s.dim, x.dtype, self._softmax)
        attention = self._attention.natively(form) if keys.dtype == x.dtype else None
        if attention is None:
            return None
        turns = rope.cos, rope.sin
        return layers(x, turns, self.slots, (keys, values), attention, count)
