"""Tree attention in Triton: a node attends to its tree's prefix, to itself and to its ancestors.

    out_i = sum_j w_ij v_j over prefix tokens j and nodes j with j <= i < ends[j]
    w = softmax(q k / sqrt(D))   or   silu(q k / sqrt(D)) / normalizer

Bytes moved per tree, KV head and block of BLOCK_Q nodes: the prefix's keys and values once, because
all query heads of the group and all nodes of the block share them. Of the tree, only the key blocks
that a node of the block can see. Per key, 4 to 8 bytes of slot number. A long prefix is split over
programs. Their partial results are merged by their log-sum-exp (plain sums for SiLU). FP8 halves
the bytes: it is decoded in registers between shared memory and the product.

One compiled kernel exists per BLOCK_Q (blocks of 16, 32, 64 and 128 rows), for partial and for
final results. All other constants belong to the model. Arguments that change between steps are not
specialised. `triton_launch.py` chooses; docs/results/kernels.md gives the counts on a Hopper.
Reference: `reference.tree_attention`. Sources: FlashAttention-2, arXiv 2307.08691; flash-decoding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels.attention import triton_launch
from recserve.kernels.attention.reference import SOFTMAX, Activation, HeadLayout
from recserve.kernels.attention.triton_launch import AttentionWork, Launch, machine_of
from recserve.kernels.cache.fp8 import Fp8, Stored, parts
from recserve.kernels.cache.triton_fp8 import decoded, has_native, powers
from recserve.kernels.tree_batch import TreeBatch

SCAN_NODES = 1024  # nodes whose subtree ends are read at once
# int64 arrays that are sometimes slices. Aligned or not, one compiled kernel serves them.
TABLES = [
    *("block_trees", "block_starts", "query_offsets", "query_nodes", "node_offsets", "node_slots"),
    *("ends", "prefix_starts", "prefix_lengths", "prefix_slots", "prefix_limits", "shared"),
    *("key_exponents", "value_exponents"),
]
LOG2E = tl.constexpr(1.4426950408889634)  # exp2 with a scaled argument saves one product per score


@triton.jit
def _load_rows(
    base, exponents, slots, valid, head, kv_heads, dims, dim_valid,
    DIM: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Loads rows [n, BLOCK_DIM] of keys or values at slots; zeros where not valid."""
    place = slots.to(tl.int64) * kv_heads + head
    rows = tl.load(
        base + place[:, None] * DIM + dims[None, :],
        mask=valid[:, None] & dim_valid[None, :],
        other=0,
    )
    if FP8:
        # Conversion to bfloat16 goes through float32, where the scale is one product.
        scale = powers(tl.load(exponents + place, mask=valid, other=0))
        rows = decoded(rows, NATIVE).to(tl.float32) * scale[:, None]
    return rows


@triton.jit
def _attend_block(
    q, keys, values, key_exponents, value_exponents, slots, valid, seen, head, kv_heads, dims,
    dim_valid, scale, acc, peak, total,
    DIM: tl.constexpr, SILU: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Adds one key block to the running result. slots, valid: [keys]. seen: [rows, keys]."""
    k = _load_rows(
        keys, key_exponents, slots, valid, head, kv_heads, dims, dim_valid, DIM, FP8, NATIVE
    ).to(q.dtype)
    v = _load_rows(
        values, value_exponents, slots, valid, head, kv_heads, dims, dim_valid, DIM, FP8, NATIVE
    ).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if SILU:
        scores = scores * scale
        weights = tl.where(seen, scores * tl.sigmoid(scores), 0.0)
        acc += tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
    else:
        # Peaks are log2 values. Scaling and subtraction are one multiply-add.
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        # A row that has seen no key uses a finite peak, so that inf - inf does not occur.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores * scale - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=TABLES)
def _attend(
    query, keys, values, key_exponents, value_exponents, out, lse,
    block_trees, block_starts, query_offsets, query_nodes,
    node_offsets, node_slots, ends, prefix_starts, prefix_lengths, prefix_slots, prefix_limits,
    shared,
    scale, inverse_normalizer, num_rows, kv_heads,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    SILU: tl.constexpr, HAS_LIMITS: tl.constexpr, HAS_SHARED: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Attends from one block of nodes of one tree, for one KV head and one split of the prefix."""
    # The last blocks of a chain see most keys, so they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, split = tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    tree = tl.load(block_trees + block)
    if tree >= 0:
        first = tl.load(block_starts + block)
        last = tl.load(query_offsets + tree + 1)
        row = tl.arange(0, BLOCK_Q * BLOCK_GROUP)
        member = row % BLOCK_GROUP
        place = first + row // BLOCK_GROUP
        row_valid = (place < last) & (member < GROUP)
        node = tl.load(query_nodes + place, mask=place < last, other=-1)
        dims = tl.arange(0, BLOCK_DIM)
        dim_valid = dims < DIM
        if not SILU:
            scale = scale * LOG2E
        heads = kv_heads * GROUP
        q_row = place.to(tl.int64) * heads + head * GROUP + member
        q_mask = row_valid[:, None] & dim_valid[None, :]
        q = tl.load(query + q_row[:, None] * DIM + dims[None, :], mask=q_mask, other=0.0)
        acc = tl.zeros([BLOCK_Q * BLOCK_GROUP, BLOCK_DIM], dtype=tl.float32)
        peak = tl.full([BLOCK_Q * BLOCK_GROUP], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_Q * BLOCK_GROUP], dtype=tl.float32)

        prefix_first = tl.load(prefix_starts + tree)
        # Positions within prefix and tree are 32 bits, so that masks of a score tile fit in
        # registers.
        prefix_length = tl.load(prefix_lengths + tree).to(tl.int32)
        limit = tl.full([BLOCK_Q * BLOCK_GROUP], 0, dtype=tl.int32) + prefix_length
        if HAS_LIMITS:
            own = tl.load(prefix_limits + node, mask=row_valid, other=0)
            limit = tl.minimum(own, prefix_length.to(tl.int64)).to(tl.int32)
        # The grid may be sized for a longer prefix. Then the first splits cover all of this one.
        chunk = tl.maximum(tl.cdiv(prefix_length, num_splits), tl.minimum(prefix_length, SPLIT))
        chunk = tl.cdiv(chunk, BLOCK_N) * BLOCK_N
        begin = split * chunk
        for start in range(begin, tl.minimum(begin + chunk, prefix_length), BLOCK_N):
            column = start + tl.arange(0, BLOCK_N)
            valid = column < prefix_length
            slots = tl.load(prefix_slots + prefix_first + column, mask=valid, other=0)
            seen = valid[None, :] & (column[None, :] < limit[:, None])
            acc, peak, total = _attend_block(
                q, keys, values, key_exponents, value_exponents, slots, valid, seen, head,
                kv_heads, dims, dim_valid, scale, acc, peak, total, DIM, SILU, FP8, NATIVE,
            )  # fmt: skip

        if split == num_splits - 1:
            tree_first = tl.load(node_offsets + tree)
            size = (tl.load(node_offsets + tree + 1) - tree_first).to(tl.int32)
            local = (node - tree_first).to(tl.int32)
            lowest = tl.min(tl.where(row_valid, local, size))
            stop = tl.max(tl.where(row_valid, local, -1)) + 1
            # Keys before the subtree that contains `lowest` are invisible to this block.
            top = lowest
            for start in range(0, lowest, SCAN):
                column = start + tl.arange(0, SCAN)
                before = column < lowest
                end = tl.load(ends + tree_first + column, mask=before, other=0)
                above = before & (end - tree_first > lowest)
                top = tl.minimum(top, tl.min(tl.where(above, column, lowest)))
            top = top // BLOCK_N * BLOCK_N
            skipped, gap = top, size * 0
            if HAS_SHARED:
                both_ways = tl.load(shared + tree).to(tl.int32)
                stop = tl.maximum(stop, both_ways)
                gap = tl.cdiv(both_ways, BLOCK_N) * BLOCK_N
                skipped = tl.maximum(top - gap, 0)
            for step in range(0, stop - skipped, BLOCK_N):
                start = tl.where(step < gap, step, step + skipped)
                column = start + tl.arange(0, BLOCK_N)
                valid = column < size
                slots = tl.load(node_slots + tree_first + column, mask=valid, other=0)
                end = tl.load(ends + tree_first + column, mask=valid, other=0)
                # A missing node ends at 0 or before, so no row sees it.
                end = (end - tree_first).to(tl.int32)
                seen = (column[None, :] <= local[:, None]) & (local[:, None] < end[None, :])
                if HAS_SHARED:
                    seen = seen | (column[None, :] < both_ways)
                acc, peak, total = _attend_block(
                    q, keys, values, key_exponents, value_exponents, slots, valid, seen, head,
                    kv_heads, dims, dim_valid, scale, acc, peak, total, DIM, SILU, FP8, NATIVE,
                )  # fmt: skip

        if SILU:
            acc = acc * inverse_normalizer
        else:
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            peak = peak / LOG2E
            # A row that sees no key of this split has weight 0: log(0) is -inf.
            tl.store(
                lse + split.to(tl.int64) * num_rows + q_row, peak + tl.log(total), mask=row_valid
            )
            # The merge does not read such a row, so it need not be written.
            written = tl.where((begin < prefix_length) | (split == num_splits - 1), DIM, 0)
            q_mask = q_mask & (dims < written)[None, :]
        target = (split.to(tl.int64) * num_rows + q_row)[:, None] * DIM + dims[None, :]
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge(
    parts, lse, out, num_rows, num_splits,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_S: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Merges the results of all splits for one row."""
    row = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DIM)
    valid = split < num_splits
    place = split.to(tl.int64) * num_rows + row
    mask = valid[:, None] & (dims < DIM)[None, :]
    weight = tl.where(valid, 1.0, 0.0)
    if not SILU:
        weight = tl.load(lse + place, mask=valid, other=float("-inf"))
        weight = tl.exp(weight - tl.max(weight))
        # Parts with weight 0 may not have been written.
        mask = mask & (weight > 0)[:, None]
    part = tl.load(parts + place[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
    merged = tl.sum(part * weight[:, None], 0)
    if not SILU:
        merged = merged / tl.sum(weight)
    tl.store(out + row * DIM + dims, merged.to(out.dtype.element_ty), mask=dims < DIM)


class TritonTreeAttention:
    """Attention of one batch, laid out once and called once per layer."""

    def __init__(
        self, batch: TreeBatch, heads: HeadLayout, activation: Activation = SOFTMAX
    ) -> None:
        tree = batch.tree
        device = batch.slots.device
        self.batch, self.activation = batch, activation
        self.native = has_native(device)
        nodes = batch.queries
        self.query_nodes = torch.arange(tree.num_nodes, device=device) if nodes is None else nodes
        self.query_offsets = torch.searchsorted(self.query_nodes, tree.offsets)
        # The grid is sized for the longest prefix that there may be.
        self.prefix_starts = batch.prefixes.starts.contiguous()
        self.prefix_lengths = batch.prefixes.lengths.contiguous()
        row_bytes = triton.next_power_of_2(heads.dim) * heads.dtype.itemsize
        self.plan = self._plan(heads.group * heads.kv_heads, heads.kv_heads, row_bytes)
        self._blocks = self.blocks(self.plan)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Stored, values: Stored
    ) -> Tensor:
        """Attends to one layer of the pool.

        Args:
            query: [Tq, H, D] of the computed nodes.
            key: Not read; the computed nodes are read from the pool.
            value: Not read.
            keys: [slots, K, D] of the pool, computed nodes written.
            values: Same shape as the keys.

        Returns:
            [Tq, H, D].

        Raises:
            ValueError: If a gradient is required.
        """
        if query.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "the kernel of tree attention has no gradient and query.requires_grad is true; "
                "train through reference.tree_attention, or serve in torch.inference_mode()"
            )
        num_queries, heads, dim = query.shape
        plan, (trees, starts) = self.plan, self._blocks
        rows, device = num_queries * heads, query.device
        query = query.contiguous()
        silu = self.activation.normalizer is not None
        out = torch.empty_like(query)
        partial, lse = out, torch.empty(0, device=device)
        if plan.num_splits > 1:
            partial = torch.empty(plan.num_splits, *query.shape, device=device)
        if not silu:
            lse = torch.empty(plan.num_splits, rows, device=device)
        tree, block_dim = self.batch.tree, max(triton.next_power_of_2(dim), 16)
        nothing = tree.offsets
        _attend[plan.num_blocks, keys.shape[1], plan.num_splits](
            query, parts(keys)[0], parts(values)[0], parts(keys)[-1], parts(values)[-1],
            partial, lse, trees, starts, self.query_offsets, self.query_nodes,
            tree.offsets, self.batch.slots, tree.ends, self.prefix_starts,
            self.prefix_lengths, self.batch.prefixes.slots,
            nothing if tree.prefix_limits is None else tree.prefix_limits,
            nothing if tree.shared is None else tree.shared,
            dim**-0.5, 1.0 / (self.activation.normalizer or 1.0), rows, keys.shape[1],
            GROUP=plan.group, BLOCK_GROUP=plan.block_group, BLOCK_Q=plan.block_q,
            DIM=dim, BLOCK_DIM=block_dim, BLOCK_N=plan.block_keys,
            SPLIT=triton_launch.SPLIT_KEYS, SILU=silu, HAS_LIMITS=tree.prefix_limits is not None,
            HAS_SHARED=tree.shared is not None,
            FP8=isinstance(keys, Fp8), NATIVE=self.native, SCAN=SCAN_NODES,
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
        if plan.num_splits > 1:
            _merge[(rows,)](
                partial, lse, out, rows, plan.num_splits,
                DIM=dim, BLOCK_DIM=block_dim,
                BLOCK_S=triton.next_power_of_2(plan.num_splits), SILU=silu,
            )  # fmt: skip
        return out

    def _plan(self, heads: int, kv_heads: int, row_bytes: int) -> Launch:
        """Returns the launch for these head counts. row_bytes: bytes of a padded key."""
        trees, fillers = self.batch.tree.num_trees, self.batch.fillers
        work = AttentionWork(self.query_nodes.shape[0], trees, self.batch.prefixes.longest, fillers)
        machine = machine_of(self.batch.slots.device)
        return triton_launch.launch(work, heads, kv_heads, row_bytes, machine)

    def blocks(self, plan: Launch) -> tuple[Tensor, Tensor]:
        """Returns the tree (-1 for none) and first computed node of each block [num_blocks]."""
        counts = self.query_offsets.diff()
        per_tree = (counts + plan.block_q - 1) // plan.block_q
        stops = per_tree.cumsum(0)
        block = torch.arange(plan.num_blocks, device=counts.device)
        tree = torch.searchsorted(stops, block, right=True)
        known = tree.clamp(max=counts.shape[0] - 1)
        inner = block - (stops - per_tree)[known]
        starts = self.query_offsets[known] + inner * plan.block_q
        return torch.where(tree < counts.shape[0], tree, -1), starts
