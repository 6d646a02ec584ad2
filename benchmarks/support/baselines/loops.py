"""Hand-written beam search: with a KV cache per beam, and as a tree under one prefix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from benchmarks.support.baselines.beams import BeamSearch, Slates
from benchmarks.support.baselines.llama import Network
from recserve.models.attention import Attend
from recserve.models.recommender import Recommender


@torch.inference_mode()
def kv_copy(model: Network, prompts: Tensor, search: BeamSearch) -> Slates:
    """Runs one prefill per user; every beam then has a copy of the cache, reordered at each level.

    `prompts` is [B, n], all of one length.
    """
    cache: Any = DynamicCache(config=model.config)
    out = model(prompts, past_key_values=cache, use_cache=True, logits_to_keep=1)
    beams = search.first(out.logits[:, -1])
    width = beams.nodes.shape[1]
    cache.batch_repeat_interleave(width)
    for level in range(1, search.levels):
        out = model(beams.tokens.view(-1, 1), past_key_values=cache, use_cache=True)
        beams, batch = search.next(beams, out.logits[:, -1], level), prompts.shape[0]
        if level + 1 < search.levels:
            cache.reorder_cache((beams.parents + torch.arange(batch)[:, None] * width).flatten())
            if beams.parents.shape[1] != width:
                raise ValueError(f"the beam shrank from {width}; draw a larger catalogue")
    return search.slates(beams)


@dataclass
class _TreeKeys(Attend):
    """Attention over all stored keys.

    `mask` is [B, 1, T, stored + T], or None for a causal prefix.
    """

    mask: Tensor | None = None
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if layer in self.keys:
            key = torch.cat([self.keys[layer], key], dim=2)
            value = torch.cat([self.values[layer], value], dim=2)
        self.keys[layer], self.values[layer] = key, value
        causal = self.mask is None
        out = F.scaled_dot_product_attention(
            query, key, value, self.mask, is_causal=causal, enable_gqa=True
        )
        return out.transpose(1, 2)


@torch.inference_mode()
def bare_tree(model: Recommender, prompts: Tensor, search: BeamSearch) -> Slates:
    """Runs one prefill per user, then one masked attention per level over prefix and beam tree.

    `prompts` is [B, n], all of one length. It has no pages, no cache between calls, no requests and
    no filters.
    """
    batch, n = prompts.shape
    attend = _TreeKeys()
    hidden = model(prompts, torch.arange(n)[None].expand(batch, -1), attend)
    beams = search.first(model.full_logits(hidden[:, -1]))
    seen = torch.empty(batch, 1, 0, dtype=torch.bool)
    for level in range(1, search.levels):
        width = beams.nodes.shape[1]
        seen = seen.gather(1, beams.parents[..., None].expand(-1, -1, seen.shape[2]))
        itself = torch.eye(width, dtype=torch.bool).expand(batch, -1, -1)
        seen = torch.cat([seen, itself], dim=2)
        prefix = torch.ones(batch, width, n, dtype=torch.bool)
        attend.mask = torch.cat([prefix, seen], dim=2)[:, None]
        positions = torch.full((batch, width), n + level - 1)
        hidden = model(beams.tokens, positions, attend)
        beams = search.next(beams, model.full_logits(hidden.flatten(0, 1)), level)
    return search.slates(beams)
