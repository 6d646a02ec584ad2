"""The interface between networks and attention.

A network computes queries, keys and values and passes them to an `Attend`. Serving uses
`PagedAttention` over the engine's pages, and training uses `DenseAttention`. The network does not
know which one it calls. Rotary positions are also here, because serving rotates and writes keys in
one pass.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.attention.attention import BatchAttention, LayerAttention, tree_attention
from recserve.kernels.attention.native import in_c
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.decoder.decoder import NativeLayers
from recserve.kernels.layers import operators
from recserve.kernels.layers.reference import HeadNorms, rotate
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.config import DecoderConfig, RopeFactors


class Attend(ABC):
    """Attention of the layers of a network."""

    @abstractmethod
    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends after RoPE.

        Args:
            layer: Number of the layer.
            query: [..., T, H, D].
            key: [..., T, K, D].
            value: [..., T, K, D].

        Returns:
            [..., T, H, D].
        """

    def of_projections(
        self, layer: int, qkv: Tensor, kv_heads: int, rope: Rope, norms: HeadNorms | None
    ) -> Tensor:
        """Attends from projections before RoPE.

        Args:
            layer: Number of the layer.
            qkv: [..., T, H + 2 K, D], queries first.
            kv_heads: K.
            rope: Rotary positions of the rows.
            norms: Norms of queries and keys. None means that they have none.

        Returns:
            [..., T, H, D].
        """
        heads = [qkv.shape[-2] - 2 * kv_heads, kv_heads]
        turned, value = torch.split(qkv, [sum(heads), kv_heads], dim=-2)
        if norms is not None:
            query, key = torch.split(turned, heads, dim=-2)
            query = operators.rms_norm(query, norms.query, norms.eps)
            key = operators.rms_norm(key, norms.key, norms.eps)
            turned = torch.cat([query, key], dim=-2)
        query, key = torch.split(rope(turned), heads, dim=-2)
        return self(layer, query, key, value)

    def in_one_call(
        self, layers: NativeLayers, x: Tensor, rope: Rope
    ) -> Callable[[Tensor, range, bool], Tensor] | None:
        """Returns a function that runs some layers of x [T, E] in one call.

        Its arguments are x, the numbers of the layers, and whether the final norm follows. The
        result is None where the layers must run one by one.
        """
        return None


@dataclass(frozen=True)
class DenseAttention(Attend):
    """Softmax attention within one padded batch, without a cache: for training and tests.

    Attributes:
        mask: [N, N] or [B, 1, N, N] bool, true where row sees column. None means causal.
        dropout: Dropout probability.
    """

    mask: Tensor | None = None
    dropout: float = 0.0

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends with query [B, N, H, D], key and value [B, N, K, D]; returns [B, N, H, D]."""
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
    """Computes scaled_dot_product_attention, whose bf16 backward pass is slow on CPUs."""
    if mask is None:
        size = query.shape[-2]
        mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    bias = torch.zeros_like(mask, dtype=value.dtype).masked_fill_(~mask, -torch.inf)
    scores = (query * query.shape[-1] ** -0.5).to(value.dtype) @ key.to(value.dtype).mT
    mixed: Tensor = (scores + bias).softmax(-1).to(value.dtype) @ value
    return mixed


@dataclass(frozen=True)
class DenseSiluAttention(Attend):
    """silu(q k / sqrt(D)) / normalizer without softmax (HSTU, MTGR), within one padded batch.

    Attributes:
        mask: [N, N] or [B, 1, N, N] bool, true where row sees column.
        normalizer: A constant, so that a row does not depend on the number of other rows.
    """

    mask: Tensor
    normalizer: float

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends with query, key and value [B, N, H, D]; returns [B, N, H, D]."""
        scores = torch.einsum("bnhd,bmhd->bhnm", query, key) * query.shape[-1] ** -0.5
        weights = F.silu(scores) * (self.mask / self.normalizer)
        return torch.einsum("bhnm,bmhd->bnhd", weights, value)


class Rope:
    """Cosines and sines of rotary positions, computed once per forward pass for all layers.

    Pairs are (d, d + D/2), the convention of Hugging Face's Llama. Source: arXiv 2104.09864.

    Attributes:
        cos: [..., T, D/2] float32.
        sin: [..., T, D/2] float32.
    """

    def __init__(
        self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype, scale: float = 1.0
    ) -> None:
        """Computes the table.

        Args:
            positions: [..., T].
            frequencies: [D/2] float32, from `rope_frequencies`.
            dtype: Type of what is rotated.
            scale: Factor on cosines and sines, from `DecoderConfig.rope_scale`.
        """
        angles = positions[..., None].float() * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()
        if scale != 1.0:
            self.cos, self.sin = self.cos * scale, self.sin * scale
        self._dtype = dtype

    @cached_property
    def _turns(self) -> tuple[Tensor, Tensor]:
        cos, sin = (x[..., None, :].to(self._dtype) for x in (self.cos, self.sin))
        return cos, sin

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates x [..., T, H, D] by its positions."""
        cos, sin = self._turns
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """Returns [D/2] float32 radians per position, on the CPU regardless of torch's defaults.

    Source of the scaling: Llama 3.1 (arXiv 2407.21783, section 3.4.2, and its published weights).
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    exponents = pairs / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, RopeFactors):
        return frequencies / torch.tensor(scaling.divisors, device="cpu")
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class PagedAttention(Attend):
    """An `Attend` that writes the keys and values of the computed nodes to their slots."""

    def __init__(
        self,
        batch: TreeBatch,
        pool: KVPool,
        activation: Activation = SOFTMAX,
        attention: BatchAttention = tree_attention,
    ) -> None:
        """Prepares the attention of one batch.

        Args:
            batch: Trees of one forward pass.
            pool: Pages of the model.
            activation: Softmax, or SiLU with a constant normaliser.
            attention: Kernel that attends to a batch.
        """
        self.pool, self.batch, self.activation = pool, batch, activation
        self.slots = batch.query_slots()
        self._attention = attention
        self._prepared: LayerAttention | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Writes key and value [Tq, K, D] to the pool, and attends with query [Tq, H, D]."""
        pool = self.pool
        pool.write(layer, self.slots, key, value)
        keys, values = pool.keys[layer], pool.values[layer]
        attend = self._prepared or self._prepare(HeadLayout.of(query, keys))
        return attend(query, key, value, keys, values)

    def _prepare(self, heads: HeadLayout) -> LayerAttention:
        """Prepares the attention of the batch, for the first layer that attends."""
        self._prepared = self._attention(self.batch, heads, self.activation)
        return self._prepared

    def of_projections(
        self, layer: int, qkv: Tensor, kv_heads: int, rope: Rope, norms: HeadNorms | None
    ) -> Tensor:
        """As Attend, with qkv [Tq, H + 2 K, D]. Rows are rotated and written in one pass."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        if self.pool.writes_as_given:
            query = operators.rope_write(qkv, rope.cos, rope.sin, self.slots, keys, values, norms)
        else:
            query, key, value = rotate(qkv, rope.cos, rope.sin, kv_heads, norms)
            self.pool.write(layer, self.slots, key.to(qkv.dtype), value)
        # Kernels read keys and values of the computed nodes from the pool, so these are
        # placeholders.
        attend = self._prepared or self._prepare(HeadLayout.of(query, keys))
        return attend(query, query, query, keys, values)

    def in_one_call(
        self, layers: NativeLayers, x: Tensor, rope: Rope
    ) -> Callable[[Tensor, range, bool], Tensor] | None:
        """As Attend, with x [Tq, E]."""
        keys, values, s = self.pool.keys, self.pool.values, layers.shape
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            return None
        if x.ndim != 2 or keys.dtype != x.dtype or torch.is_grad_enabled():
            return None
        attention = in_c(
            self._prepared
            or self._prepare(HeadLayout(s.kv_heads, s.heads // s.kv_heads, s.dim, x.dtype))
        )
        if attention is None:
            return None
        turns = rope.cos, rope.sin
        return lambda x, numbers, norm: layers(
            x, turns, self.slots, (keys, values), attention, numbers, norm
        )


class LayeredAttention(Attend):
    """An `Attend` whose layers see different keys."""

    def __init__(self, layers: Sequence[PagedAttention]) -> None:
        """Takes the attention of each layer. All of them compute the same nodes."""
        self._layers = layers

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Calls the attention of a layer."""
        return self._layers[layer](layer, query, key, value)

    def of_projections(
        self, layer: int, qkv: Tensor, kv_heads: int, rope: Rope, norms: HeadNorms | None
    ) -> Tensor:
        """Calls the attention of a layer."""
        return self._layers[layer].of_projections(layer, qkv, kv_heads, rope, norms)
