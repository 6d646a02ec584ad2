"""Plain torch references of the kernels: one dense mask, one softmax.

They are slow and short. Every fast implementation is tested against them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.fp8 import Fp8, Stored, copy_rows, put
from recserve.kernels.paged_kv import PrefixTable, TreeBatch


@dataclass(frozen=True)
class Activation:
    """How attention turns scores into weights: softmax, or silu(score) / normalizer (HSTU, MTGR).

    Attributes:
        normalizer: None for softmax. Otherwise a constant, so that a row's result does not depend
            on the number of other rows.
    """

    normalizer: float | None = None


SOFTMAX = Activation()


def tree_attention(
    query: Tensor,
    keys: Stored,
    values: Stored,
    batch: TreeBatch,
    activation: Activation = SOFTMAX,
) -> Tensor:
    """Computes attention of every node to its tree's root, to itself and to its ancestors.

    Scores are scaled by D ** -0.5. Sums are taken in float32.

    Args:
        query: [Tq, H, D] of the computed nodes.
        keys: [slots, K, D], one layer of the pool with the new nodes already written.
        values: Same shape as the keys.
        batch: Trees of the forward pass; root slots as a tuple.
        activation: Softmax, or SiLU with a constant normaliser.

    Returns:
        [Tq, H, D] in query's dtype.
    """
    tree, dim = batch.tree, query.shape[-1]
    groups = query.shape[1] // keys.shape[1]
    queries = batch.queries
    if queries is None:
        queries = torch.arange(tree.num_nodes, device=query.device)
    tree_mask = tree.dense_mask()[queries]
    trees = tree.tree_ids()[queries]
    out = torch.empty_like(query)
    assert not isinstance(batch.prefix_slots, PrefixTable)
    for b, prefix_slots in enumerate(batch.prefix_slots):
        rows = (trees == b).nonzero().flatten()
        start, stop = int(tree.offsets[b]), int(tree.offsets[b + 1])
        slots = torch.cat([prefix_slots, batch.slots[start:stop]])
        root_mask = torch.ones(
            rows.shape[0], prefix_slots.shape[0], dtype=torch.bool, device=query.device
        )
        if tree.root_limits is not None:
            seen = torch.arange(prefix_slots.shape[0], device=query.device)
            root_mask = seen[None, :] < tree.root_limits[queries[rows], None]
        mask = torch.cat([root_mask, tree_mask[rows, start:stop]], dim=1)
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
    """Computes the same softmax attention where the roots are a table.

    Every computed node gathers the W places of its tree's row and all T nodes, and masks what it
    does not see. Shapes depend on Tq, T, W and B alone. Masked places may hold anything, even NaN.

    Args:
        query: [Tq, H, D] of the computed nodes.
        keys: [slots, K, D], one layer of the pool.
        values: Same shape as the keys.
        batch: Trees of the forward pass; `prefix_slots` is a `PrefixTable`.

    Returns:
        [Tq, H, D] in query's dtype.
    """
    tree, roots, groups = batch.tree, batch.prefix_slots, query.shape[1] // keys.shape[1]
    assert isinstance(roots, PrefixTable)
    trees, inside, own = tree.tree_ids(), tree.dense_mask(), batch.query_slots()
    if batch.queries is not None:
        trees, inside = trees[batch.queries], inside[batch.queries]
    width = torch.arange(roots.slots.shape[1], device=query.device)
    mask = torch.cat([width < roots.lengths[trees, None], inside], dim=1)
    nodes = batch.slots.expand(query.shape[0], -1)
    slots = torch.cat([roots.slots[roots.rows[trees]], nodes], dim=1)
    # A masked place may hold no valid slot. It reads the node's own slot, with weight 0.
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


def move_paths(
    keys: Stored, values: Stored, sources: Tensor, targets: Tensor, lengths: Tensor
) -> None:
    """Moves the keys and values of accepted paths to their final slots, in place, in all layers.

    A target may be a source of the same or an earlier step of its own path, because the nodes of a
    path never lie before their targets. It is never a source of a later step.

    Args:
        keys: [layers, slots, K, D].
        values: Same shape as the keys.
        sources: [B, D + 1] slots.
        targets: [B, D + 1] slots.
        lengths: [B]. Only the first lengths[b] slots of path b are moved.
    """
    sources, targets = sources.flatten(), targets.flatten()
    if not sources.shape[0]:
        return
    longest = sources.shape[0] // lengths.shape[0]
    inside = (torch.arange(longest, device=sources.device) < lengths[:, None]).flatten()
    # A step that is not moved repeats one that is, or copies a slot to itself if there is none.
    some = inside.to(torch.uint8).argmax()
    idle_source, idle_target = sources[some], torch.where(inside[some], targets, sources)[some]
    source = torch.where(inside, sources, idle_source)
    target = torch.where(inside, targets, idle_target)
    for pool in (keys, values):
        copy_rows(pool, 1, source, target)


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms of queries and keys before they are rotated (QK norm).

    Attributes:
        query: [D] weight of the queries' norm.
        key: [D] weight of the keys' norm.
        eps: Added to the mean square.
    """

    query: Tensor
    key: Tensor
    eps: float


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Stored,
    values: Stored,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotates queries and keys by their positions, and writes keys and values to their slots.

    Args:
        qkv: [T, H + 2 K, D], queries first.
        cos: [T, D / 2] float32.
        sin: [T, D / 2] float32.
        slots: [T], distinct.
        keys: [slots, K, D], one layer of the pool.
        values: Same shape as the keys.
        norms: Norms of queries and keys. None means that they have none.

    Returns:
        The rotated queries [T, H, D].
    """
    query, key, value = rotate(qkv, cos, sin, keys.shape[1], norms)
    put(keys, slots, key)
    put(values, slots, value)
    return query


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits projections as for `rope_write`, and rotates queries and keys by their positions.

    Computes in float32 and rounds once.

    Returns:
        Queries [T, H, D] in the type of qkv, keys [T, K, D] in float32, and values [T, K, D].
    """
    turned, value = torch.split(qkv, [qkv.shape[1] - kv_heads, kv_heads], dim=1)
    turned = turned.float()
    if norms is not None:
        heads = turned.shape[1] - kv_heads
        weights = torch.cat([norms.query.expand(heads, -1), norms.key.expand(kv_heads, -1)])
        turned = F.rms_norm(turned, turned.shape[-1:], eps=norms.eps) * weights.float()
    low, high = turned.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    query, key = torch.split(turned, [turned.shape[1] - kv_heads, kv_heads], dim=1)
    return query.to(qkv.dtype), key, value


@dataclass(frozen=True)
class HeadTopK:
    """Best tokens of n rows under P heads.

    Attributes:
        values: [n, P, k] float32 logits in descending order.
        tokens: [n, P, k]. Ties resolve to the lowest token.
    """

    values: Tensor
    tokens: Tensor


def head_topk(hidden: Tensor, weight: Tensor, k: int) -> HeadTopK:
    """Returns the k best tokens of every head.

    Args:
        hidden: [n, P, E].
        weight: [P, V, E], or [1, V, E] for heads that share one matrix.
        k: Tokens per head, at most V.
    """
    logits = torch.einsum(
        "npe,pve->npv", hidden.float(), weight.float().expand(hidden.shape[1], -1, -1)
    )
    values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
    return HeadTopK(values[..., :k], tokens[..., :k])
