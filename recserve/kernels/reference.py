"""Plain torch twins: one dense mask, one softmax. Slow, short, and the truth that every fast path
is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.fp8 import Fp8, Stored, copy_rows, put
from recserve.kernels.paged_kv import RootTable, TreeBatch


@dataclass(frozen=True)
class Activation:
    """What turns scores into weights: softmax, or silu(score) / normalizer without one (HSTU,
    MTGR).

    normalizer: None for softmax; else a constant, so that no row's result depends on how many
    others there are.
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
    """Every node attends to its tree's root, to itself and to its ancestors.

    query: [Tq, H, D]. keys, values: [slots, K, D], one layer of the pool, the new nodes already
    written.
    Scores are scaled by D ** -0.5. Returns [Tq, H, D] in query's dtype; sums are taken in float32.
    """
    tree, dim = batch.tree, query.shape[-1]
    groups = query.shape[1] // keys.shape[1]
    queries = batch.queries
    if queries is None:
        queries = torch.arange(tree.num_nodes, device=query.device)
    tree_mask = tree.dense_mask()[queries]
    trees = tree.tree_ids()[queries]
    out = torch.empty_like(query)
    assert not isinstance(batch.root_slots, RootTable)
    for b, root_slots in enumerate(batch.root_slots):
        rows = (trees == b).nonzero().flatten()
        start, stop = int(tree.offsets[b]), int(tree.offsets[b + 1])
        slots = torch.cat([root_slots, batch.slots[start:stop]])
        root_mask = torch.ones(
            rows.shape[0], root_slots.shape[0], dtype=torch.bool, device=query.device
        )
        if tree.root_limits is not None:
            seen = torch.arange(root_slots.shape[0], device=query.device)
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
    """The same softmax where the roots are a table: every computed node gathers the W places of its
    tree's row and all T nodes, and masks what it does not see. Shapes depend on Tq, T, W and B.

    query: [Tq, H, D]; keys, values: [slots, K, D]. What a mask hides may hold anything, even NaN.
    """
    tree, roots, groups = batch.tree, batch.root_slots, query.shape[1] // keys.shape[1]
    assert isinstance(roots, RootTable)
    trees, inside, own = tree.tree_ids(), tree.dense_mask(), batch.query_slots()
    if batch.queries is not None:
        trees, inside = trees[batch.queries], inside[batch.queries]
    width = torch.arange(roots.slots.shape[1], device=query.device)
    mask = torch.cat([width < roots.lengths[trees, None], inside], dim=1)
    nodes = batch.slots.expand(query.shape[0], -1)
    slots = torch.cat([roots.slots[roots.rows[trees]], nodes], dim=1)
    # An unseen place may hold no slot at all yet: the node's own is read there, and counts 0.
    slots = torch.where(mask, slots, own[:, None])
    key, value = (_rows(pool, slots) for pool in (keys, values))
    heads = query.float().reshape(query.shape[0], keys.shape[1], groups, query.shape[2])
    scores = torch.einsum("nkgd,nmkd->nkgm", heads, key) * query.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~mask[:, None, None], float("-inf")), dim=-1)
    return torch.einsum("nkgm,nmkd->nkgd", weights, value).flatten(1, 2).to(query.dtype)


def _rows(pool: Stored, slots: Tensor) -> Tensor:
    """[n, m, K, D] float32 of slots [n, m]; a CPU reads rows faster by number than by index."""
    flat = slots.flatten()
    rows = pool.rows(flat) if isinstance(pool, Fp8) else pool.index_select(0, flat)
    return rows.float().view(*slots.shape, *pool.shape[1:])


def move_paths(
    keys: Stored, values: Stored, sources: Tensor, targets: Tensor, lengths: Tensor
) -> None:
    """Accepted paths to where the next step looks for them, in place, in all layers.

    keys, values: [layers, slots, K, D]. sources, targets: [B, D + 1] slots; only the first
    lengths[b] of path b are moved. A target may be a source of the same or an earlier step of its
    own path (the nodes of a path lie at or behind their targets), never of a later one.
    """
    sources, targets = sources.flatten(), targets.flatten()
    if not sources.shape[0]:
        return
    longest = sources.shape[0] // lengths.shape[0]
    inside = (torch.arange(longest, device=sources.device) < lengths[:, None]).flatten()
    # What is not moved repeats one move that is, or stays where it is if there is none.
    some = inside.to(torch.uint8).argmax()
    idle_source, idle_target = sources[some], torch.where(inside[some], targets, sources)[some]
    source = torch.where(inside, sources, idle_source)
    target = torch.where(inside, targets, idle_target)
    for pool in (keys, values):
        copy_rows(pool, 1, source, target)


def rope_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Stored, values: Stored
) -> Tensor:
    """Queries and keys turned by their positions; keys and values written to their slots.

    qkv: [T, H + 2 K, D], queries first. cos, sin: [T, D / 2] float32. slots: [T], distinct. keys,
    values: [slots, K, D], one layer of the pool. Returns the queries [T, H, D]; computed in
    float32, rounded once.
    """
    kv_heads = keys.shape[1]
    turned, value = torch.split(qkv, [qkv.shape[1] - kv_heads, kv_heads], dim=1)
    low, high = turned.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    query, key = torch.split(turned, [turned.shape[1] - kv_heads, kv_heads], dim=1)
    put(keys, slots, key)
    put(values, slots, value)
    return query.to(qkv.dtype)


@dataclass(frozen=True)
class HeadTopK:
    """Best tokens of n rows under P heads: values [n, P, k] logits in descending order, tokens
    [n, P, k], the lowest first among equals; float32.
    """

    values: Tensor
    tokens: Tensor


def head_topk(hidden: Tensor, weight: Tensor, k: int) -> HeadTopK:
    """The k best tokens of every head. hidden [n, P, E]; weight [P, V, E], or [1, V, E] for heads
    that share one matrix; k at most V.
    """
    logits = torch.einsum(
        "npe,pve->npv", hidden.float(), weight.float().expand(hidden.shape[1], -1, -1)
    )
    values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
    return HeadTopK(values[..., :k], tokens[..., :k])
