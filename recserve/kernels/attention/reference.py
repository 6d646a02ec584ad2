"""Tree attention in plain torch: one dense mask, one softmax.

It is slow and short. Every fast implementation is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.cache.fp8 import Fp8, Stored
from recserve.kernels.tree_batch import TreeBatch


@dataclass(frozen=True)
class Activation:
    """How attention turns scores into weights: softmax, or silu(score) / normalizer (HSTU, MTGR).

    Attributes:
        normalizer: None for softmax. Otherwise a constant, so that a row's result does not depend
            on the number of other rows.
    """

    normalizer: float | None = None


SOFTMAX = Activation()


@dataclass(frozen=True)
class HeadLayout:
    """Heads of a model and how a pool stores them: with the batch, they decide who attends.

    Attributes:
        kv_heads: K.
        group: G, query heads per KV head.
        dim: D, head dimension.
        dtype: Type of queries.
        fp8: Whether keys and values are stored in FP8. Otherwise they have the type of queries.
    """

    kv_heads: int
    group: int
    dim: int
    dtype: torch.dtype
    fp8: bool = False

    @staticmethod
    def of(query: Tensor, keys: Stored) -> HeadLayout:
        """Returns the layout of queries [Tq, H, D] to keys [slots, K, D] of a pool's layer."""
        kv_heads, dim = keys.shape[1:]
        return HeadLayout(
            kv_heads, query.shape[1] // kv_heads, dim, query.dtype, isinstance(keys, Fp8)
        )


def tree_attention(
    query: Tensor,
    keys: Stored,
    values: Stored,
    batch: TreeBatch,
    activation: Activation = SOFTMAX,
) -> Tensor:
    """Computes attention of every node to its tree's prefix, to itself and to its ancestors.

    Scores are scaled by D ** -0.5. Sums are taken in float32.

    Args:
        query: [Tq, H, D] of the computed nodes.
        keys: [slots, K, D], one layer of the pool with the new nodes already written.
        values: Same shape as the keys.
        batch: Trees of the forward pass. With `fixed_shapes` the activation is softmax.
        activation: Softmax, or SiLU with a constant normaliser.

    Returns:
        [Tq, H, D] in query's dtype.
    """
    if batch.fixed_shapes:
        return padded_tree_attention(query, keys, values, batch)
    tree, dim = batch.tree, query.shape[-1]
    groups = query.shape[1] // keys.shape[1]
    queries = batch.queries
    if queries is None:
        queries = torch.arange(tree.num_nodes, device=query.device)
    tree_mask = tree.dense_mask()[queries]
    trees = tree.tree_ids()[queries]
    out = torch.empty_like(query)
    for b, prefix in enumerate(batch.prefixes):
        rows = (trees == b).nonzero().flatten()
        start, stop = int(tree.offsets[b]), int(tree.offsets[b + 1])
        slots = torch.cat([prefix, batch.slots[start:stop]])
        prefix_mask = torch.ones(
            rows.shape[0], prefix.shape[0], dtype=torch.bool, device=query.device
        )
        if tree.prefix_limits is not None:
            seen = torch.arange(prefix.shape[0], device=query.device)
            prefix_mask = seen[None, :] < tree.prefix_limits[queries[rows], None]
        mask = torch.cat([prefix_mask, tree_mask[rows, start:stop]], dim=1)
        key = keys[slots].float().repeat_interleave(groups, dim=1)
        value = values[slots].float().repeat_interleave(groups, dim=1)
        scores = torch.einsum("nhd,mhd->hnm", query[rows].float(), key) * dim**-0.5
        if activation.normalizer is None:
            weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        else:
            weights = F.silu(scores) * (mask / activation.normalizer)
        out[rows] = torch.einsum("hnm,mhd->nhd", weights, value).to(query.dtype)
    return out


def padded_tree_attention(query: Tensor, keys: Stored, values: Stored, batch: TreeBatch) -> Tensor:
    """Computes the same softmax attention with fixed shapes.

    Every computed node gathers as many places as the longest prefix may have and all T nodes, and
    masks what it does not see. Masked places may hold anything, even NaN.

    Args:
        query: [Tq, H, D] of the computed nodes.
        keys: [slots, K, D], one layer of the pool.
        values: Same shape as the keys.
        batch: Trees of the forward pass. The host does not read their prefixes.

    Returns:
        [Tq, H, D] in query's dtype.
    """
    tree, prefixes, groups = batch.tree, batch.prefixes, query.shape[1] // keys.shape[1]
    trees, inside, own = tree.tree_ids(), tree.dense_mask(), batch.query_slots()
    if batch.queries is not None:
        trees, inside = trees[batch.queries], inside[batch.queries]
    token = torch.arange(prefixes.longest, device=query.device)
    before = token < prefixes.lengths[trees, None]
    if tree.prefix_limits is not None:
        limits = tree.prefix_limits if batch.queries is None else tree.prefix_limits[batch.queries]
        before = before & (token < limits[:, None])
    # A masked place may lie outside of the table, or hold no slot. It reads the node's own slot.
    places = torch.where(before, prefixes.starts[trees, None] + token, 0)
    mask = torch.cat([before, inside], dim=1)
    nodes = batch.slots.expand(query.shape[0], -1)
    slots = torch.cat([prefixes.slots.view(-1)[places], nodes], dim=1)
    slots = torch.where(mask, slots, own[:, None])
    key, value = (_rows(pool, slots) for pool in (keys, values))
    heads = query.float().reshape(query.shape[0], keys.shape[1], groups, query.shape[2])
    scores = torch.einsum("nkgd,nmkd->nkgm", heads, key) * query.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~mask[:, None, None], float("-inf")), dim=-1)
    return torch.einsum("nkgm,nmkd->nkgd", weights, value).flatten(1, 2).to(query.dtype)


def _rows(pool: Stored, slots: Tensor) -> Tensor:
    """Returns float32 [n, m, K, D] at slots [n, m]; a CPU gathers flat rows faster."""
    flat = slots.flatten()
    rows = pool.rows(flat) if isinstance(pool, Fp8) else pool.index_select(0, flat)
    return rows.float().view(*slots.shape, *pool.shape[1:])
