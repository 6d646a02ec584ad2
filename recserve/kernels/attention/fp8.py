"""Attention on a CPU to an FP8 pool.

Once per layer, what a batch reads is decoded to the query's own type, each tree next to its prefix.
Attention in that type then reads the copy. The copy includes the keys and values of the nodes
computed now. So a node has the same values for nodes scored with it and for nodes scored later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from recserve.kernels.attention.reference import Activation, HeadLayout
from recserve.kernels.cache.fp8 import Fp8, Stored
from recserve.kernels.tree_batch import Prefixes, TreeBatch


class DecodedAttention:
    """Attention of one batch to an FP8 pool, laid out once and called once per layer."""

    def __init__(
        self,
        batch: TreeBatch,
        heads: HeadLayout,
        activation: Activation,
        attention: Callable[[TreeBatch, HeadLayout, Activation], Callable[..., Tensor]],
    ) -> None:
        """Plans the copy. `attention` attends to it."""
        read, prefixes, nodes, begin = [], [], [], 0
        bounds = pairwise(batch.tree.offsets.tolist())
        for prefix, (start, stop) in zip(batch.prefixes, bounds, strict=True):
            read += [prefix, batch.slots[start:stop]]
            end = begin + prefix.shape[0] + stop - start
            places = torch.arange(begin, end, device=prefix.device)
            prefixes.append(places[: prefix.shape[0]])
            nodes.append(places[prefix.shape[0] :])
            begin = end
        moved = TreeBatch(batch.tree, batch.queries, torch.cat(nodes), Prefixes.of(prefixes))
        self._read, self._computed = torch.cat(read), moved.query_slots()
        self._attention = attention(moved, replace(heads, fp8=False), activation)

    def __call__(
        self, query: Tensor, _key: Tensor, _value: Tensor, keys: Stored, values: Stored
    ) -> Tensor:
        """Attends as `attention.tree_attention`; new nodes are read from the pool as well."""
        assert isinstance(keys, Fp8) and isinstance(values, Fp8)
        key, value = (pool.rows(self._read).to(query.dtype) for pool in (keys, values))
        own = self._computed
        return self._attention(query, key[own], value[own], key, value)
