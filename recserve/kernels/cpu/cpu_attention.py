"""Tree attention for CPUs, in torch or in C.

Softmax attention runs in C without a plan where native_attention.py supports it. Otherwise each
tree uses one of these forms, with n computed nodes, R root
tokens, N tree nodes and at most A ancestors per node:

- Few nodes: root and tree are one list of keys, n x (R + N) scores. Few rows and keys use batched
  products. Others use one flash call for all trees with the same layout in the pool.
- Otherwise root and tree give two results that are merged by their log-sum-exp. The root part is
  one flash call of n x R scores for all nodes and all query heads of a KV group. The tree part
  depends on its shape. A chain uses causal flash (n x n / 2), a shallow tree n x (A + 1) gathered
  keys, any other tree n x N scores.

A mask over the root exists only if the nodes have root limits, and a T x T mask never exists.
Bytes moved: root keys and values once, or twice if a product needs a dense copy. The tree's keys
once, or once per ancestor in a shallow tree.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.cpu.cpu_plan import Form, Place, PlanPart, Whole, plan
from recserve.kernels.cpu.native_attention import NativeTreeAttention
from recserve.kernels.paged_kv import TreeBatch
from recserve.kernels.reference import SOFTMAX, Activation

ROW_BLOCK = 512


class CpuTreeAttention:
    """Attention of one batch, planned at the first layer and called once per layer of a network."""

    def __init__(
        self,
        batch: TreeBatch,
        activation: Activation = SOFTMAX,
        native: bool = False,
    ) -> None:
        """Stores what to attend to; planning happens at the first call.

        Args:
            batch: Trees of one forward pass.
            activation: Softmax, or SiLU with a constant normaliser.
            native: Whether to attend in C where C supports it.
        """
        self.batch, self.activation, self.native = batch, activation, native
        self._parts: list[PlanPart] = []
        self._natively: NativeTreeAttention | None = None
        self._form: Form | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attends to one layer of the pool. Sizes and type must be the same in every call.

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
        kv_heads, dim = keys.shape[1:]
        softmax = self.activation.normalizer is None
        form = Form(kv_heads, query.shape[1] // kv_heads, dim, query.dtype, softmax)
        native = self.natively(form) if keys.dtype == query.dtype else None
        if native is not None:
            return native(query, key, value, keys, values)
        if not self._parts:
            self._parts = plan(self.batch, form)
        attend = _softmax if softmax else self._silu
        if len(self._parts) == 1:
            return attend(self._parts[0], query, keys, values)
        return torch.cat([attend(p, query[p.rows], keys, values) for p in self._parts])

    def natively(self, form: Form) -> NativeTreeAttention | None:
        """Returns the same attention in C, or None where torch attends to this batch."""
        if self._form != form:
            self._form = form
            self._natively = NativeTreeAttention.of(self.batch, form) if self.native else None
        return self._natively

    def _silu(self, part: PlanPart, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Adds up SiLU-weighted sums of root and tree; they need no merge by log-sum-exp."""
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
                own = (query[rows] * keys[part.keys][rows]).sum(-1, keepdim=True).mul_(scale)
                total += F.silu(own) * values[part.keys][rows]
                if part.ancestors.shape[1]:
                    slots = part.ancestors[rows]
                    scores = torch.einsum("nhd,nahd->nah", query[rows], keys[slots]).mul_(scale)
                    scores = F.silu(scores) * part.ancestor_mask[rows, :, None]
                    total += torch.einsum("nah,nahd->nhd", scores, values[slots])
            out[rows] = total * inverse
        return out


def _softmax(part: PlanPart, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns softmax attention over root and tree together, [n, H, D]."""
    n, heads, dim = query.shape
    kv_heads = keys.shape[1]
    # Heads of one KV group become extra rows of one problem, so the group's keys are read once.
    if part.whole is not None:
        attend = _few if part.whole.few_scores else _joined
        return attend(part.whole, query, keys, values)
    grouped = query.view(n, kv_heads, heads // kv_heads, dim).transpose(0, 1)
    if part.chain:
        tree_out, tree_lse = _flash_chain(grouped, keys[part.keys], values[part.keys])
    elif part.mask is not None:
        tree_out, tree_lse = _flash(grouped, keys[part.keys], values[part.keys], part.mask)
    else:
        tree_out, tree_lse = _shallow(part, grouped, keys, values)
    if part.root_length:
        root_out, root_lse = _flash(grouped, keys[part.root], values[part.root], part.root_mask)
        if part.root_empty is not None:
            # A row that sees no root token has no sum. Its root part weighs nothing in the merge.
            root_lse = root_lse.masked_fill(part.root_empty[None, :, None], float("-inf"))
            root_out = root_out.masked_fill(part.root_empty[None, :, None, None], 0.0)
        # The tree's share of the joint softmax.
        share = torch.sigmoid(tree_lse - root_lse).unsqueeze(-1).to(query.dtype)
        tree_out = torch.lerp(root_out, tree_out, share)
    return tree_out.transpose(0, 1).reshape(n, heads, dim)


def _few(whole: Whole, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attends to few rows and keys of one tree with two batched products; [n, H, D]."""
    n, heads, dim = query.shape
    kv_heads = keys.shape[1]
    rows = query.view(n, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    key, value = _together(keys, whole.places), _together(values, whole.places)
    assert whole.mask is not None
    scores = torch.baddbmm(whole.mask, rows, key.permute(1, 2, 0), alpha=dim**-0.5)
    out = torch.bmm(torch.softmax(scores, -1), value.transpose(0, 1))
    return out.view(kv_heads, n, -1, dim).transpose(0, 1).reshape(n, heads, dim)


def _joined(whole: Whole, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attends with one flash call to one tree, or to several trees of equal layout; [n, H, D]."""
    kv_heads, dim = keys.shape[1:]
    rows = query.view(whole.count, -1, kv_heads, query.shape[1] // kv_heads, dim).transpose(1, 2)
    shape = rows.shape
    rows = rows.reshape(whole.count, kv_heads, -1, dim)
    num_rows = rows.shape[2]
    if num_rows == 1 and rows.dtype != torch.float32:
        # The kernel takes three times as long for one row of 16-bit floats as for two.
        rows = rows.expand(whole.count, kv_heads, 2, dim)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        rows, _heads_first(keys, whole), _heads_first(values, whole), attn_mask=whole.mask
    )[0]
    return out[:, :, :num_rows].view(shape).transpose(1, 2).reshape(query.shape)


def _heads_first(pool: Tensor, whole: Whole) -> Tensor:
    """Returns [B, K, m, D] of a pool [slots, K, D]: a view where the keys are consecutive."""
    if whole.count == 1:
        return _together(pool, whole.places).transpose(0, 1)[None]
    assert isinstance(whole.places[0], slice)
    slot, head, one = pool.stride()
    shape = whole.count, pool.shape[1], whole.num_keys, pool.shape[2]
    first = pool.storage_offset() + whole.places[0].start * slot
    return pool.as_strided(shape, (whole.distance * slot, head, slot, one), first)


def _together(pool: Tensor, places: tuple[Place, ...]) -> Tensor:
    """Returns the keys [m, K, D] at some places of a pool [slots, K, D]."""
    return pool[places[0]] if len(places) == 1 else torch.cat([pool[place] for place in places])


def _flash(
    grouped: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs one flash call.

    Args:
        grouped: [K, n, G, D] queries, G query heads per KV head.
        key: [m, K, D].
        value: [m, K, D].
        mask: [n, m], added to the scores. None means that all rows see all keys.

    Returns:
        The result [K, n, G, D] and its log-sum-exp [K, n, G].
    """
    kv_heads, n, groups, dim = grouped.shape
    if mask is not None:
        mask = mask[None, None, :, None, :]
        mask = mask.expand(1, 1, n, groups, -1).flatten(2, 3)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped.reshape(1, kv_heads, n * groups, dim),
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
    )
    return out.view(kv_heads, n, groups, dim), lse.view(kv_heads, n, groups)


def _flash_chain(grouped: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attends causally among the computed rows; grouped [K, n, G, D], key and value [n, K, D]."""
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
    part: PlanPart, grouped: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Attends from each row to itself and its few gathered ancestors."""
    assert part.ancestors is not None and part.ancestor_mask is not None
    scale = grouped.shape[-1] ** -0.5
    key = keys[part.keys].transpose(0, 1).unsqueeze(2)
    value = values[part.keys].transpose(0, 1).unsqueeze(2)
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
