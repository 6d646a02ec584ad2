"""Rejection sampling in Triton: a walk over drawn drafts, without host sync.

    r = p    child x, in order: accepted if coin q(x) < r(x), else r becomes max(r - q, 0) / its
    sum, or p if that is zero;   bonus ~ r at the node where no child is left

The walk reads single numbers. It goes over the vocabulary only after a rejection with another
sibling to try, so never in chains. The residual of the last rejection is not stored. The bonus is
drawn from it in splits of the vocabulary, next to a draw from p in case nothing is left.

Bytes moved: 12 V per tree for the bonus (p, q, and p again), 12 V per rejection before a sibling.
Reference: acceptance.accept_drawn_reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels.acceptance import triton_noise as noise
from recserve.kernels.acceptance.acceptance import DraftProbs, Keys, Walk
from recserve.kernels.acceptance.noise import LANES, TILE
from recserve.kernels.acceptance.triton_accept import (
    COUNTS,
    NONE,
    TABLES,
    better,
    chosen_of,
    empty_walk,
    shares,
    tiles_of,
)
from recserve.kernels.tree import TokenTree


@triton.jit
def _drawn_from(q, rows, tokens, child, token, vocabulary, inside):
    """Returns the draft's probabilities of some tokens; a chosen child has 1 at its own token."""
    row = tl.load(rows + child)
    drawn = tl.load(q + row * vocabulary + token, mask=inside & (row >= 0), other=0.0)
    return tl.where(row >= 0, drawn, (tl.load(tokens + child) == token).to(tl.float32))


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def drawn_walk_kernel(
    p, q, rows, residuals, tokens, ends, kinds, seeds, prefix_lengths, offsets,
    nodes, lengths, refusals, totals, vocabulary, max_depth,
    TILE: tl.constexpr, HAS_KINDS: tl.constexpr,
):  # fmt: skip
    """Walks down one tree and tries children in order.

    Writes to `refusals` the last rejected child of the final node, -1 for none. Writes to `totals`
    the sum of the residual before it if this lies in `residuals`, else 0.
    """
    tree = tl.program_id(0).to(tl.int64)
    seed, first = tl.load(seeds + tree), tl.load(offsets + tree)
    step = (tl.load(prefix_lengths + tree) + 1) << 32
    out, residual = nodes + tree * (max_depth + 1), residuals + tree * vocabulary
    node = first
    tl.store(out, node)
    lane = tl.arange(0, TILE)
    length = tree * 0
    accepted, refused = node, node * 0 - 1
    stored = 0.0
    while accepted >= 0:
        accepted, refused = node * 0 - 1, node * 0 - 1
        stored = 0.0
        source = p + node * vocabulary
        child, stop = node + 1, tl.load(ends + node)
        while child < stop:
            kind = node * 0
            if HAS_KINDS:
                kind = tl.load(kinds + child)
            if kind == 0:
                if refused >= 0:
                    total = tl.where(stored > 0, stored, 1.0)
                    rest = 0.0
                    for start in range(0, vocabulary, TILE):
                        token = start + lane
                        inside = token < vocabulary
                        weight = tl.load(source + token, mask=inside, other=0.0)
                        drawn = _drawn_from(q, rows, tokens, refused, token, vocabulary, inside)
                        weight = tl.maximum(tl.div_rn(weight, total) - drawn, 0.0)
                        tl.store(residual + token, weight, mask=inside)
                        rest += tl.sum(weight, 0)
                    tl.debug_barrier()
                    # p and q are equal except for rounding, so a rejection says nothing about p.
                    source = tl.where(rest > 0, residual, p + node * vocabulary)
                    stored = rest
                total = tl.where(stored > 0, stored, 1.0)
                token = tl.load(tokens + child)
                coin = noise.uniform(
                    seed, step + child - first, tree.to(tl.int32) * 0, noise.ACCEPT
                )
                row = tl.load(rows + child)
                drawn = tl.load(q + row * vocabulary + token, mask=row >= 0, other=1.0)
                if coin * drawn < tl.div_rn(tl.load(source + token), total):
                    accepted = child
                else:
                    refused = child
            child = tl.where(accepted >= 0, stop, tl.load(ends + child))
        if accepted >= 0:
            node = accepted
            length += 1
            tl.store(out + length, node)
    for depth in range(length + 1, max_depth + 1):
        tl.store(out + depth, -1)
    tl.store(lengths + tree, length)
    tl.store(refusals + tree, refused)
    tl.store(totals + tree, stored)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def bonus_kernel(
    p, q, rows, residuals, tokens, seeds, prefix_lengths, nodes, lengths, refusals, totals,
    values, choices, vocabulary, max_depth, tiles_per_split,
    LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Draws the bonus of one tree in one split of the vocabulary.

    Writes the best token of the residual over its noise. Writes the best token of p behind the
    entries of all trees.
    """
    tree, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    trees, num_splits = tl.num_programs(0), tl.num_programs(1)
    node = tl.load(nodes + tree * (max_depth + 1) + tl.load(lengths + tree))
    seed, position = tl.load(seeds + tree), (tl.load(prefix_lengths + tree) + 1) << 32
    refused, stored = tl.load(refusals + tree), tl.load(totals + tree)
    total = tl.where(stored > 0, stored, 1.0)
    source = tl.where(stored > 0, residuals + tree * vocabulary, p + node * vocabulary)
    lane = tl.arange(0, LANES)
    best, whole = tl.full([LANES], -1.0, tl.float32), tl.full([LANES], -1.0, tl.float32)
    where, whole_at = tl.full([LANES], 0, tl.int32) + NONE, tl.full([LANES], 0, tl.int32) + NONE
    start, stop = tiles_of(split, tiles_per_split, vocabulary, TILE)
    for tile in range(start, stop):
        words = noise.words(seed, position, tile * LANES + lane, noise.RESIDUAL)
        for word in tl.static_range(4):
            token = tile * TILE + word * LANES + lane
            inside = token < vocabulary
            waited = noise.exponential_of_words(words[word])
            all_of = tl.load(p + node * vocabulary + token, mask=inside, other=0.0)
            weight = tl.load(source + token, mask=inside, other=0.0)
            if refused >= 0:
                drawn = _drawn_from(q, rows, tokens, refused, token, vocabulary, inside)
                weight = tl.maximum(tl.div_rn(weight, total) - drawn, 0.0)
            value = tl.where(inside, tl.div_rn(weight, waited), -1.0)
            best, where = better(value, token, best, where)
            value = tl.where(inside, tl.div_rn(all_of, waited), -1.0)
            whole, whole_at = better(value, token, whole, whole_at)
    place = tree * num_splits + split
    peak, whole_peak = tl.max(best, 0), tl.max(whole, 0)
    tl.store(values + place, peak)
    tl.store(choices + place, tl.min(tl.where(best == peak, where, NONE), 0))
    place += trees.to(tl.int64) * num_splits
    tl.store(values + place, whole_peak)
    tl.store(choices + place, tl.min(tl.where(whole == whole_peak, whole_at, NONE), 0))


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def pick_kernel(values, choices, bonus, num_splits, BLOCK_SPLITS: tl.constexpr):
    """Picks the bonus of one tree over all splits; from p where no residual is left."""
    tree, trees = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    split = tl.arange(0, BLOCK_SPLITS)
    value = tl.load(values + tree * num_splits + split, mask=split < num_splits, other=-1.0)
    row = tl.where(tl.max(value, 0) > 0, tree, tree + trees)
    chosen = chosen_of(values, choices, row, num_splits, BLOCK_SPLITS)
    tl.store(bonus + tree, chosen.to(tl.int64))


def accept_drawn(p: Tensor, q: DraftProbs, tree: TokenTree, keys: Keys, max_depth: int) -> Walk:
    """Runs `acceptance.accept_drawn_reference` in three launches."""
    vocabulary, trees, device = p.shape[1], tree.num_trees, p.device
    p, drafted = p.contiguous(), q.values.contiguous()
    has_kinds = tree.kinds is not None
    splits, per_split = shares(vocabulary, 1)
    walk = empty_walk(trees, max_depth, device)
    residuals = torch.empty(trees, vocabulary, device=device)
    refusals = torch.empty(trees, dtype=torch.int64, device=device)
    totals = torch.empty(trees, device=device)
    drawn_walk_kernel[(trees,)](
        p, drafted, q.rows, residuals, tree.tokens, tree.ends,
        tree.kinds if has_kinds else tree.ends, keys.seeds, keys.prefix_lengths, tree.offsets,
        walk.nodes, walk.lengths, refusals, totals, vocabulary, max_depth,
        TILE=TILE, HAS_KINDS=has_kinds, enable_fp_fusion=False,
    )  # fmt: skip
    values = torch.empty(2 * trees, splits, device=device)
    choices = torch.empty(2 * trees, splits, dtype=torch.int32, device=device)
    bonus_kernel[trees, splits](
        p, drafted, q.rows, residuals, tree.tokens, keys.seeds, keys.prefix_lengths, walk.nodes,
        walk.lengths, refusals, totals, values, choices, vocabulary, max_depth, per_split,
        LANES=LANES, TILE=TILE, enable_fp_fusion=False,
    )  # fmt: skip
    width = triton.next_power_of_2(splits)
    pick_kernel[(trees,)](values, choices, walk.bonus, splits, BLOCK_SPLITS=width)
    return walk
