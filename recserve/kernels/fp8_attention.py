"""Attention to a pool, of whatever type it is.

Triton reads FP8 as it lies. Elsewhere what a batch reads is decoded once per layer, trees side by
side with their roots, and attention of the query's own type reads that: keys and values of the
nodes computed now included, so that a node is the same to those scored with it and to those after
it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.fp8 import Fp8, Stored
from recserve.kernels.paged_kv import RootTable, TreeBatch
from recserve.kernels.reference import Activation

PoolAttention = Callable[[TreeBatch, Activation], Callable[..., Tensor]]


def attention_to(stored: Stored, attention: dispatch.BatchAttention) -> PoolAttention:
    """The same attention, but to layers of keys and values that are stored as these are."""
    if isinstance(stored, Tensor) or dispatch.in_triton(stored):
        return attention

    def attend(batch: TreeBatch, activation: Activation) -> Callable[..., Tensor]:
        if isinstance(batch.root_slots, RootTable):
            return attention(batch, activation)  # the twin, which takes any
        return DecodedAttention(batch, activation, attention)

    return attend


class DecodedAttention:
    """Attention of one batch to FP8, laid out once, called once per layer."""

    def __init__(
        self, batch: TreeBatch, activation: Activation, attention: dispatch.BatchAttention
    ) -> None:
        assert not isinstance(batch.root_slots, RootTable)
        read, roots, nodes, begin = [], [], [], 0
        bounds = pairwise(batch.tree.offsets.tolist())
        for root, (start, stop) in zip(batch.root_slots, bounds, strict=True):
            read += [root, batch.slots[start:stop]]
            end = begin + root.shape[0] + stop - start
            places = torch.arange(begin, end, device=root.device)
            roots.append(places[: root.shape[0]])
            nodes.append(places[root.shape[0] :])
            begin = end
        moved = TreeBatch(batch.tree, batch.queries, torch.cat(nodes), tuple(roots))
        self._read, self._computed = torch.cat(read), moved.query_slots()
        self._attention = attention(moved, activation)

    def __call__(
        self, query: Tensor, _key: Tensor, _value: Tensor, keys: Stored, values: Stored
    ) -> Tensor:
        """As `dispatch.tree_attention`'s; the computed nodes' own are read from the pool too."""
        assert isinstance(keys, Fp8) and isinstance(values, Fp8)
        key, value = (pool.rows(self._read).to(query.dtype) for pool in (keys, values))
        own = self._computed
        return self._attention(query, key[own], value[own], key, value)
