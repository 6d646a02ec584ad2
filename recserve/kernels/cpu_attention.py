"""Tree attention for CPUs: the root by a flash kernel that reads it once for all nodes, the tree by
its shape.

Per tree, with n computed nodes, R root tokens, A ancestors at most and N tree nodes:
  root part   n x R, one flash call for all nodes and all query heads of a KV group
  tree part   chain: causal flash, n x n / 2;   shallow: n x (A + 1) gathered keys;   other: n x N,
  in row blocks
and the two are merged by their log-sum-exp. No mask over the root exists unless the nodes have root
limits, and no T x T mask ever does. Bytes moved: root keys and values once, the tree's keys once
per ancestor of a node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.paged_kv import TreeBatch
from recserve.kernels.reference import SOFTMAX, Activation

ROW_BLOCK = 512
SHALLOW = 8


@dataclass(frozen=True)
class _Part:
    """One tree's share of a batch, worked out once and used by every layer.

    rows: its rows among the computed nodes. root: slots of the root, as a slice where they are
    consecutive.
    root_mask [n, R]: only with root limits. chain: causal among the computed rows, nothing else.
    ancestors [n, A] slots and ancestor_mask [n, A]: proper ancestors of a shallow tree.
    keys [N] slots and mask [n, N]: any other tree.
    """

    rows: slice
    root: slice | Tensor
    root_length: int
    root_mask: Tensor | None
    chain: bool = False
    ancestors: Tensor | None = None
    ancestor_mask: Tensor | None = None
    keys: slice | Tensor | None = None
    mask: Tensor | None = None


class CpuTreeAttention:
    """Attention of one batch, planned once, called once per layer."""

    def __init__(self, batch: TreeBatch, activation: Activation = SOFTMAX) -> None:
        self.activation = activation
        self.parts = _plan(batch, softmax=activation.normalizer is None)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """query [Tq, H, D], key and value [Tq, K, D] of the computed nodes, keys and values [slots,
        K, D] of the pool.

        The computed nodes are already in the pool. Returns [Tq, H, D].
        """
        attend = self._silu if self.activation.normalizer is not None else _softmax
        if len(self.parts) == 1:
            return attend(self.parts[0], query, key, value, keys, values)
        out = [
            attend(part, query[part.rows], key[part.rows], value[part.rows], keys, values)
            for part in self.parts
        ]
        return torch.cat(out)

    def _silu(
        self, part: _Part, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Sums of silu weights need no merging: each part is added to the last."""
        assert self.activation.normalizer is not None
        scale, inverse = query.shape[-1] ** -0.5, 1.0 / self.activation.normalizer
        out = torch.empty_like(query)
        root_keys = keys[part.root].permute(1, 2, 0)
        root_values = values[part.root].transpose(0, 1)
        for start in range(0, query.shape[0], ROW_BLOCK):
            rows = slice(start, start + ROW_BLOCK)
            block = query[rows].transpose(0, 1)
            weights = F.silu(torch.bmm(block, root_keys).mul_(scale), inplace=True)
            if part.root_mask is not None:
                weights *= part.root_mask[rows]
            total = torch.bmm(weights, root_values).transpose(0, 1)
            if part.mask is not None:
                weights = F.silu(torch.bmm(block, keys[part.keys].permute(1, 2, 0)).mul_(scale))
                weights *= part.mask[rows]
                total += torch.bmm(weights, values[part.keys].transpose(0, 1)).transpose(0, 1)
            else:
                assert part.ancestors is not None and part.ancestor_mask is not None
                own = (query[rows] * key[rows]).sum(-1, keepdim=True).mul_(scale)
                total += F.silu(own) * value[rows]
                if part.ancestors.shape[1]:
                    slots = part.ancestors[rows]
                    scores = torch.einsum("nhd,nahd->nah", query[rows], keys[slots]).mul_(scale)
                    scores = F.silu(scores) * part.ancestor_mask[rows, :, None]
                    total += torch.einsum("nah,nahd->nhd", scores, values[slots])
            out[rows] = total * inverse
        return out


def _softmax(
    part: _Part, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Softmax over root and tree together, [n, H, D]."""
    n, heads, dim = query.shape
    kv_heads = key.shape[1]
    # Heads of one KV group become extra rows of one problem: the group's keys are read once.
    grouped = query.view(n, kv_heads, heads // kv_heads, dim).transpose(0, 1)
    if part.chain:
        tree_out, tree_lse = _flash_chain(grouped, key, value)
    elif part.mask is not None:
        mask = part.mask[None, None, :, None, :].expand(1, 1, n, heads // kv_heads, -1)
        tree_out, tree_lse = _flash(grouped, keys[part.keys], values[part.keys], mask.flatten(2, 3))
    else:
        tree_out, tree_lse = _shallow(part, grouped, key, value, keys, values)
    if part.root_length:
        root_mask: Tensor | None = None
        if part.root_mask is not None:
            mask = part.root_mask[None, None, :, None, :].expand(1, 1, n, heads // kv_heads, -1)
            root_mask = mask.flatten(2, 3)
        root_out, root_lse = _flash(grouped, keys[part.root], values[part.root], root_mask)
        # Weight of the tree's part of the one softmax.
        share = torch.sigmoid(tree_lse - root_lse).unsqueeze(-1).to(query.dtype)
        tree_out = torch.lerp(root_out, tree_out, share)
    return tree_out.transpose(0, 1).reshape(n, heads, dim)


def _flash(
    grouped: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """grouped [K, n, G, D], key and value [m, K, D], mask [1, 1, n * G, m] -> [K, n, G, D],
    log-sum-exp [K, n, G].
    """
    kv_heads, n, groups, dim = grouped.shape
    additive: Tensor | None = None
    if mask is not None:
        additive = torch.zeros(mask.shape, dtype=grouped.dtype).masked_fill_(~mask, float("-inf"))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped.reshape(1, kv_heads, n * groups, dim),
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=additive,
    )
    if mask is not None:
        # A row that sees nothing has no sum: its part weighs nothing in the merge.
        empty = ~mask[0, 0].any(-1)
        lse = lse.masked_fill(empty, float("-inf"))
        out = out.masked_fill(empty[None, None, :, None], 0.0)
    return out.view(kv_heads, n, groups, dim), lse.view(kv_heads, n, groups)


def _flash_chain(grouped: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention among the computed rows; grouped [K, n, G, D], key and value [n, K, D]."""
    kv_heads, n, groups, dim = grouped.shape
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped.transpose(1, 2).reshape(1, kv_heads * groups, n, dim),
        key.repeat_interleave(groups, dim=1).transpose(0, 1)[None],
        value.repeat_interleave(groups, dim=1).transpose(0, 1)[None],
        is_causal=True,
    )
    out = out.view(kv_heads, groups, n, dim).transpose(1, 2)
    return out, lse.view(kv_heads, groups, n).transpose(1, 2)


def _shallow(
    part: _Part, grouped: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Each row with itself and its few gathered ancestors."""
    assert part.ancestors is not None and part.ancestor_mask is not None
    scale = grouped.shape[-1] ** -0.5
    key, value = key.transpose(0, 1).unsqueeze(2), value.transpose(0, 1).unsqueeze(2)
    own = (grouped * key).sum(-1, dtype=torch.float32) * scale
    if not part.ancestors.shape[1]:
        return value.expand_as(grouped), own
    past_keys, past_values = keys[part.ancestors], values[part.ancestors]
    scores = torch.einsum("kngd,nakd->knga", grouped, past_keys).float() * scale
    scores = scores.masked_fill(~part.ancestor_mask[None, :, None, :], float("-inf"))
    scores = torch.cat([own.unsqueeze(-1), scores], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp_().to(grouped.dtype)
    out = torch.einsum("knga,nakd->kngd", weights[..., 1:], past_values)
    return torch.addcmul(out, weights[..., :1], value), lse


def _plan(batch: TreeBatch, softmax: bool) -> list[_Part]:
    """Work out each tree's shape once per forward."""
    tree = batch.tree
    queries = batch.queries
    if queries is None:
        queries = torch.arange(tree.num_nodes)
    offsets = tree.offsets.tolist()
    bounds = torch.searchsorted(queries, tree.offsets).tolist()
    parts = []
    for b, root_slots in enumerate(batch.root_slots):
        start, stop = offsets[b], offsets[b + 1]
        nodes = queries[bounds[b] : bounds[b + 1]]
        if nodes.shape[0] == 0:
            continue
        limits = None if tree.root_limits is None else tree.root_limits[nodes]
        root_mask = None
        if limits is not None and int(limits.min()) < root_slots.shape[0]:
            root_mask = torch.arange(root_slots.shape[0])[None, :] < limits[:, None]
        base = _Part(
            slice(bounds[b], bounds[b + 1]),
            _consecutive(root_slots),
            root_slots.shape[0],
            root_mask,
        )
        parts.append(_with_tree(base, batch, nodes, start, stop, softmax))
    return parts


def _with_tree(
    base: _Part, batch: TreeBatch, nodes: Tensor, start: int, stop: int, softmax: bool
) -> _Part:
    """Add how the nodes see each other."""
    tree = batch.tree
    shared = 0 if tree.shared is None else int(tree.shared[int(tree.tree_ids()[nodes[0]])])
    all_new = nodes.shape[0] == stop - start
    depth = int(tree.depths[nodes].max())
    if softmax and all_new and not shared and depth == stop - start - 1:
        return replace(base, chain=True)
    if not shared and depth < SHALLOW:
        ancestors = tree.ancestors(depth)[nodes]
        slots = batch.slots[ancestors.clamp(min=0)]
        return replace(base, ancestors=slots, ancestor_mask=ancestors >= 0)
    columns = torch.arange(start, stop)
    mask = (columns[None, :] <= nodes[:, None]) & (nodes[:, None] < tree.ends[start:stop][None, :])
    if shared:
        mask[:, :shared] = True
    return replace(base, keys=_consecutive(batch.slots[start:stop]), mask=mask)


def _consecutive(slots: Tensor) -> slice | Tensor:
    """The same slots as a slice where they follow each other: a view instead of a copy."""
    n = slots.shape[0]
    if n == 0:
        return slice(0, 0)
    first = int(slots[0])
    if int(slots[-1]) == first + n - 1 and (n < 3 or bool((slots.diff() == 1).all())):
        return slice(first, first + n)
    return slots
