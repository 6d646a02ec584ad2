"""Tree attention for CPUs: the root by a flash kernel that reads it once for all nodes, the tree by
its shape.

Per tree, with n computed nodes, R root tokens, A ancestors at most and N tree nodes:
  root part   n x R, one flash call for all nodes and all query heads of a KV group
  tree part   chain: causal flash, n x n / 2;   few nodes: n x N under a mask;   shallow: n x (A +
  1) gathered keys;   other: n x N
and the two are merged by their log-sum-exp. Few nodes over a root that is short, or scattered and
so must be gathered anyway, are one flash call over both. No mask over the root exists otherwise,
unless the nodes have root limits, and no T x T mask ever does. Bytes moved: root keys and values
once, the tree's keys once, in a shallow tree once per ancestor of a node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.paged_kv import RootTable, TreeBatch
from recserve.kernels.reference import SOFTMAX, Activation

ROW_BLOCK = 512
SHALLOW = 8
FEW = 256  # nodes whose N x N mask costs less than gathering each node's ancestors
SHORT = 512  # tokens that are copied faster than two results are merged


@dataclass(frozen=True)
class _Part:
    """One tree's share of a batch, worked out once and used by every layer.

    rows: its rows among the computed nodes. root: slots of the root, as a slice where they are
    consecutive.
    root_mask [n, R]: only with root limits; root_empty [n]: rows that see nothing of the root.
    chain: causal among the computed rows, nothing else. ancestors [n, A] slots and ancestor_mask
    [n, A]: proper ancestors of a shallow tree. keys [N] slots and mask [n, N]: any other tree, or
    root and tree in one where root_length is 0. root_mask and mask are bool for silu, and 0 or -inf
    for softmax, which adds them.
    """

    rows: slice
    root: slice | Tensor
    root_length: int
    root_mask: Tensor | None
    root_empty: Tensor | None = None
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
        tree_out, tree_lse = _flash(grouped, keys[part.keys], values[part.keys], part.mask)
    else:
        tree_out, tree_lse = _shallow(part, grouped, key, value, keys, values)
    if part.root_length:
        root_out, root_lse = _flash(grouped, keys[part.root], values[part.root], part.root_mask)
        if part.root_empty is not None:
            # A row that sees nothing has no sum: its part weighs nothing in the merge.
            root_lse = root_lse.masked_fill(part.root_empty[None, :, None], float("-inf"))
            root_out = root_out.masked_fill(part.root_empty[None, :, None, None], 0.0)
        # Weight of the tree's part of the one softmax.
        share = torch.sigmoid(tree_lse - root_lse).unsqueeze(-1).to(query.dtype)
        tree_out = torch.lerp(root_out, tree_out, share)
    return tree_out.transpose(0, 1).reshape(n, heads, dim)


def _flash(
    grouped: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """grouped [K, n, G, D], key and value [m, K, D], mask [n, m] added -> [K, n, G, D], log-sum-exp
    [K, n, G].
    """
    kv_heads, n, groups, dim = grouped.shape
    if mask is not None:
        mask = mask.to(grouped.dtype)[None, None, :, None, :]
        mask = mask.expand(1, 1, n, groups, -1).flatten(2, 3)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped.reshape(1, kv_heads, n * groups, dim),
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
    )
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
    assert not isinstance(batch.root_slots, RootTable)
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
        if softmax and root_mask is not None:
            empty = ~root_mask.any(-1)
            base = replace(base, root_mask=_added(root_mask), root_empty=empty)
        parts.append(_with_tree(base, batch, root_slots, nodes, start, stop, softmax))
    return parts


def _with_tree(
    base: _Part,
    batch: TreeBatch,
    root_slots: Tensor,
    nodes: Tensor,
    start: int,
    stop: int,
    softmax: bool,
) -> _Part:
    """Add how the nodes see each other."""
    tree = batch.tree
    shared = 0 if tree.shared is None else int(tree.shared[int(tree.tree_ids()[nodes[0]])])
    all_new = nodes.shape[0] == stop - start
    depth = int(tree.depths[nodes].max())
    few = softmax and stop - start <= FEW
    joined = few and (base.root_length <= SHORT or isinstance(base.root, Tensor))
    is_chain = softmax and all_new and not shared and depth == stop - start - 1
    if is_chain and not (joined and base.root_length):
        return replace(base, chain=True)
    if not few and not shared and depth < SHALLOW:
        ancestors = tree.ancestors(depth)[nodes]
        slots = batch.slots[ancestors.clamp(min=0)]
        return replace(base, ancestors=slots, ancestor_mask=ancestors >= 0)
    columns = torch.arange(start, stop)
    mask = (columns[None, :] <= nodes[:, None]) & (nodes[:, None] < tree.ends[start:stop][None, :])
    if shared:
        mask[:, :shared] = True
    slots = batch.slots[start:stop]
    if softmax:
        mask = _added(mask)
    if joined and base.root_length:
        root_mask = base.root_mask
        if root_mask is None:
            root_mask = torch.zeros(nodes.shape[0], base.root_length)
        slots, mask = torch.cat([root_slots, slots]), torch.cat([root_mask, mask], dim=1)
        base = replace(base, root_length=0)
    return replace(base, keys=_consecutive(slots), mask=mask)


def _added(mask: Tensor) -> Tensor:
    """0 where the mask is true, -inf elsewhere."""
    return torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))


def _consecutive(slots: Tensor) -> slice | Tensor:
    """The same slots as a slice where they follow each other: a view instead of a copy."""
    n = slots.shape[0]
    if n == 0:
        return slice(0, 0)
    first = int(slots[0])
    if int(slots[-1]) == first + n - 1 and (n < 3 or bool((slots.diff() == 1).all())):
        return slice(first, first + n)
    return slots
