"""How a layer attends: the one seam between the networks and the engine.

A trunk computes queries, keys and values and hands them to an `Attend`. In serving that is the
engine's paged tree attention; in training it is `DenseAttention` below. The trunk cannot tell them
apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


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
