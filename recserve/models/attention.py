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
        out = F.scaled_dot_product_attention(
            query.transpose(-3, -2),
            key.transpose(-3, -2),
            value.transpose(-3, -2),
            attn_mask=self.mask,
            dropout_p=self.dropout,
            is_causal=self.mask is None,
        )
        return out.transpose(-3, -2)


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
