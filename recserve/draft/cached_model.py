"""A language model beside the target, with one slot of keys and values per token it has read.

Slots have no order, so a drafted token that was accepted keeps its slot: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.paged_kv import KVPool, KVShape, TreeBatch
from recserve.kernels.tree import TokenTree
from recserve.models.language_model import LanguageModel


@dataclass(frozen=True)
class Chains:
    """Tokens to read: B chains, packed, each after what it stands on.

    tokens, slots [n]: the new tokens and where their keys and values go. lengths: of the chains.
    roots: for each chain the slots [L] of everything before it, in order.
    """

    tokens: Tensor
    slots: Tensor
    lengths: Seq[int]
    roots: tuple[Tensor, ...]

    def tree(self) -> TokenTree:
        """The chains as token trees."""
        device = self.tokens.device
        sizes = torch.tensor(self.lengths)
        stops = sizes.cumsum(0)
        offsets = torch.cat([stops.new_zeros(1), stops])
        index = torch.arange(self.tokens.shape[0])
        depths = index - offsets[:-1].repeat_interleave(sizes)
        parents = torch.where(depths > 0, index - 1, -1)
        columns = torch.stack([parents, depths, stops.repeat_interleave(sizes)]).to(device)
        return TokenTree(self.tokens, columns[0], columns[1], columns[2], offsets.to(device))


class CachedModel:
    """num_slots: tokens of all sequences together."""

    def __init__(self, model: LanguageModel, num_slots: int) -> None:
        decoder, weight = model.config.decoder, model.tokens.weight
        shape = KVShape(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self.model = model
        self.device = weight.device
        self.pool = KVPool(shape, num_slots, 1, weight.dtype, weight.device)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Slots for `count` tokens. Raises ValueError where fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} slots are needed and {len(self._free)} are free")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give(self, slots: Seq[int]) -> None:
        """Hand slots back."""
        self._free += slots

    @torch.inference_mode()
    def read(self, chains: Chains) -> Tensor:
        """Final hidden states [n, E] of the new tokens; their keys and values are kept."""
        batch = TreeBatch(chains.tree(), None, chains.slots, chains.roots)
        attention, pool = dispatch.tree_attention(batch), self.pool

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            pool.write(layer, chains.slots, key, value)
            return attention(query, key, value, pool.keys[layer], pool.values[layer])

        hidden: Tensor = self.model(chains.tokens, batch.positions(), attend)
        return hidden
