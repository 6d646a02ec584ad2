"""Plain torch twins: one dense mask, one softmax. Slow, short, and the truth that every fast path
is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.paged_kv import TreeBatch


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
    keys: Tensor,
    values: Tensor,
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
