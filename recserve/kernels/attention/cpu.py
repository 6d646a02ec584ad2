"""Tree attention in torch on a CPU.

It attends in blocks of rows. The rows of a block see the prefix, the nodes of the block, and the
ancestors of its first node, because nodes are in preorder. So a block of n rows under R tokens
costs n x (R + n + depth) scores, and a mask of the whole tree never exists. Each block copies its
keys and values once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.tree_batch import TreeBatch

ROWS = 128


class CpuTreeAttention:
    """Attention of one batch, prepared once and called once per layer."""

    def __init__(
        self, batch: TreeBatch, heads: HeadLayout, activation: Activation = SOFTMAX
    ) -> None:
        """Plans the blocks.

        Args:
            batch: Trees of one forward pass.
            heads: Heads of queries and keys.
            activation: Softmax, or SiLU with a constant normaliser.
        """
        self.heads, self.activation = heads, activation
        self._blocks = _blocks(batch, activation, heads)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attends to one layer of the pool.

        The computed nodes are already in the pool and are read from there, not from key and value.

        Args:
            query: [Tq, H, D] of the computed nodes.
            key: [Tq, K, D], not read.
            value: [Tq, K, D], not read.
            keys: [slots, K, D], one layer of the pool.
            values: Same shape as the keys.

        Returns:
            [Tq, H, D].
        """
        heads = self.heads
        attend = _softmax if self.activation.normalizer is None else self._silu
        out = torch.empty_like(query)
        for block in self._blocks:
            rows = torch.unflatten(query[block.rows], 1, (heads.kv_heads, -1))
            rows = rows.transpose(0, 1).flatten(1, 2)
            key, value = (x.index_select(0, block.slots).transpose(0, 1) for x in (keys, values))
            mixed = attend(rows, key, value, block.mask)
            mixed = torch.unflatten(mixed, 1, (-1, heads.group))
            out[block.rows] = mixed.transpose(0, 1).flatten(1, 2)
        return out

    def _silu(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        assert self.activation.normalizer is not None
        scores = torch.bmm(query, key.mT).mul_(query.shape[-1] ** -0.5)
        weights = F.silu(scores, inplace=True)
        if mask is not None:
            weights *= mask
        return torch.bmm(weights, value).div_(self.activation.normalizer)


def _softmax(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attends from rows [K, n G, D] to [K, m, D] with a mask [n G, m] that is added."""
    count = query.shape[1]
    if count == 1 and query.dtype != torch.float32:
        # The kernel takes three times as long for one row of 16-bit floats as for two.
        query, mask = query.expand(-1, 2, -1), None if mask is None else mask.expand(2, -1)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query[None], key[None], value[None], attn_mask=mask
    )[0]
    return out[0, :, :count]


@dataclass(frozen=True)
class _Block:
    """Consecutive rows of one tree, and the keys that they see.

    Attributes:
        rows: The rows among the computed nodes, n of them.
        slots: [m] slots of prefix and nodes.
        mask: [n * G, m]. 0 or -inf for softmax, 0 or 1 for SiLU. None if all rows see all keys.
    """

    rows: slice
    slots: Tensor
    mask: Tensor | None


def _blocks(batch: TreeBatch, activation: Activation, heads: HeadLayout) -> list[_Block]:
    tree, prefixes = batch.tree, batch.prefixes
    queries = torch.arange(tree.num_nodes) if batch.queries is None else batch.queries
    bounds = torch.searchsorted(queries, tree.offsets).tolist()
    offsets = tree.offsets.tolist()
    shared = [0] * len(prefixes) if tree.shared is None else tree.shared.tolist()
    blocks = []
    for b, prefix in enumerate(prefixes):
        for begin in range(bounds[b], bounds[b + 1], ROWS):
            rows = slice(begin, min(begin + ROWS, bounds[b + 1]))
            nodes = queries[rows]
            for_all = offsets[b] + shared[b]
            columns = torch.arange(offsets[b], max(int(nodes[-1]) + 1, for_all))
            columns = columns[(tree.ends[columns] > nodes[0]) | (columns < for_all)]
            row = nodes[:, None]
            seen = ((columns <= row) & (row < tree.ends[columns])) | (columns < for_all)
            before = torch.ones(nodes.shape[0], prefix.shape[0], dtype=torch.bool)
            if tree.prefix_limits is not None:
                before = torch.arange(prefix.shape[0]) < tree.prefix_limits[row]
            seen = torch.cat([before, seen], dim=1)
            slots = torch.cat([prefix, batch.slots[columns]])
            blocks.append(_Block(rows, slots, _mask(seen, activation, heads)))
    return blocks


def _mask(seen: Tensor, activation: Activation, heads: HeadLayout) -> Tensor | None:
    if bool(seen.all()):
        return None
    mask = seen.repeat_interleave(heads.group, dim=0)
    if activation.normalizer is not None:
        return mask.to(heads.dtype)
    return torch.zeros(mask.shape, dtype=heads.dtype).masked_fill_(~mask, float("-inf"))
