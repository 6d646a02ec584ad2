"""Rejection sampling in Triton: a walk over drawn drafts, no host sync, every pass split.

    r_0 = p    r_(j+1) = max(r_j / sum r_j - q, 0), or p where that is nothing    at every node
    walk: child j of a node is taken if coin q(x) < r_j(x) / sum r_j;   bonus ~ r behind the last

What is left of p after j refusals at a node does not depend on which tokens were refused. So the
sums of the first ROUNDS are known before the walk: one launch each, over all nodes and shares of
the vocabulary. The walk reads single numbers, and goes over the vocabulary by itself only where
more children than that are refused; the bonus is drawn in shares again.

Bytes moved: 8 V per node and round for nodes that have so many children (p and q; the residual is
worked out anew and not stored), 8 V for the bonus. Twin: accept_reference.accept_drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels import noise_kernel as noise
from recserve.kernels.accept import NONE, chosen_of, empty_walk
from recserve.kernels.accept_reference import Keys, Walk
from recserve.kernels.noise import LANES, TILE
from recserve.kernels.tree import TokenTree

ROUNDS = 3
MAX_SPLITS = 256


@triton.jit
def _sum_of(parts, node, turn, num_splits, ROUNDS: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Sum over the shares of one node's vocabulary, in the same order everywhere."""
    split = tl.arange(0, BLOCK_SPLITS)
    place = (node * ROUNDS + turn) * num_splits + split
    return tl.sum(tl.load(parts + place, mask=split < num_splits, other=0.0), 0)


@triton.jit
def _and_one(sums, rest):
    """One sum more."""
    return sums + (rest,)


@triton.jit
def _left(p, q, sums, refused, ROUNDS: tl.constexpr):
    """r after `refused` refusals and its sum, from p, q and the sums of all rounds."""
    weight, total = p, 1.0
    for turn in tl.static_range(ROUNDS):
        rest, used = sums[turn], turn < refused
        lower = tl.maximum(tl.div_rn(weight, total) - q, 0.0)
        # p and q equal but for rounding: a refusal says nothing about p.
        lower = tl.where(rest > 0, lower, p)
        weight = tl.where(used, lower, weight)
        total = tl.where(used, tl.where(rest > 0, rest, 1.0), total)
    return weight, total


@triton.jit
def rest_kernel(
    p, q, ends, kinds, parts, vocabulary, tiles_per_split,
    TURN: tl.constexpr, ROUNDS: tl.constexpr, TILE: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    HAS_KINDS: tl.constexpr,
):  # fmt: skip
    """One node and one share of the vocabulary: what refusal number TURN leaves of it."""
    node, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_splits = tl.num_programs(1)
    children = node * 0
    child, stop = node + 1, tl.load(ends + node)
    while child < stop:
        if HAS_KINDS:
            children += (tl.load(kinds + child) == 0).to(tl.int64)
        else:
            children += 1
        child = tl.where(children > TURN, stop, tl.load(ends + child))
    if children > TURN:
        sums = ()
        for turn in tl.static_range(ROUNDS):
            rest = 0.0
            if turn < TURN:
                rest = _sum_of(parts, node, turn, num_splits, ROUNDS, BLOCK_SPLITS)
            sums = _and_one(sums, rest)
        first = split * tiles_per_split
        last = tl.minimum(first + tiles_per_split, tl.cdiv(vocabulary, TILE))
        lane = tl.arange(0, TILE)
        rest = 0.0
        for tile in range(first, last):
            token = tile * TILE + lane
            inside = token < vocabulary
            target = tl.load(p + node * vocabulary + token, mask=inside, other=0.0)
            drawn = tl.load(q + node * vocabulary + token, mask=inside, other=0.0)
            weight, total = _left(target, drawn, sums, TURN, ROUNDS)
            rest += tl.sum(tl.maximum(tl.div_rn(weight, total) - drawn, 0.0), 0)
        tl.store(parts + (node * ROUNDS + TURN) * num_splits + split, rest)


@triton.jit
def drawn_walk_kernel(
    p, q, parts, residuals, tokens, ends, kinds, positions, seeds, offsets,
    nodes, lengths, last, refusals, vocabulary, num_splits, max_depth,
    ROUNDS: tl.constexpr, TILE: tl.constexpr, BLOCK_SPLITS: tl.constexpr, HAS_KINDS: tl.constexpr,
):  # fmt: skip
    """One tree: children tried in order. Leaves the node where it stopped and how often it was
    refused there; ROUNDS + 1: what is left of p lies in `residuals`.
    """
    tree = tl.program_id(0).to(tl.int64)
    seed, node = tl.load(seeds + tree), tl.load(offsets + tree)
    out, residual = nodes + tree * (max_depth + 1), residuals + tree * vocabulary
    tl.store(out, node)
    lane = tl.arange(0, TILE)
    length = tree * 0
    accepted = node
    refused, kept = tree * 0, tree * 0
    while accepted >= 0:
        target, draft = p + node * vocabulary, q + node * vocabulary
        sums = ()
        for turn in tl.static_range(ROUNDS):
            rest = _sum_of(parts, node, turn, num_splits, ROUNDS, BLOCK_SPLITS)
            sums = _and_one(sums, rest)
        source, total = target, 1.0
        position = tl.load(positions + node)
        accepted = node * 0 - 1
        refused = tree * 0
        kept = tree * 0
        tried = tree.to(tl.int32) * 0
        child, stop = node + 1, tl.load(ends + node)
        while child < stop:
            kind = node * 0
            if HAS_KINDS:
                kind = tl.load(kinds + child)
            if kind == 0:
                token = tl.load(tokens + child)
                coin = noise.uniform(seed, position, tried, noise.ACCEPT)
                drawn = tl.load(draft + token)
                known, sum_known = _left(tl.load(target + token), drawn, sums, refused, ROUNDS)
                stored = tl.load(source + token)
                past = refused > ROUNDS
                share = tl.div_rn(tl.where(past, stored, known), tl.where(past, total, sum_known))
                if coin * drawn < share:
                    accepted = child
                else:
                    if refused >= ROUNDS:
                        rest = 0.0
                        for start in range(0, vocabulary, TILE):
                            column = start + lane
                            inside = column < vocabulary
                            weight = tl.load(source + column, mask=inside, other=0.0)
                            minus = tl.load(draft + column, mask=inside, other=0.0)
                            before, sum_before = _left(weight, minus, sums, ROUNDS, ROUNDS)
                            weight = tl.where(past, weight, before)
                            whole = tl.where(past, total, sum_before)
                            weight = tl.maximum(tl.div_rn(weight, whole) - minus, 0.0)
                            tl.store(residual + column, weight, mask=inside)
                            rest += tl.sum(weight, 0)
                        tl.debug_barrier()
                        kept = tl.where(rest > 0, tree * 0 + 1, tree * 0)
                        source = tl.where(rest > 0, residual, target)
                        total = tl.where(rest > 0, rest, 1.0)
                    refused = tl.minimum(refused + 1, ROUNDS + 1)
                tried += 1
            child = tl.where(accepted >= 0, stop, tl.load(ends + child))
        if accepted >= 0:
            node = accepted
            length += 1
            tl.store(out + length, node)
        else:
            # p itself is what no refusal has touched.
            refused = tl.where((refused > ROUNDS) & (kept == 0), 0, refused)
    for depth in range(length + 1, max_depth + 1):
        tl.store(out + depth, -1)
    tl.store(lengths + tree, length)
    tl.store(last + tree, node)
    tl.store(refusals + tree, refused)


@triton.jit
def bonus_kernel(
    p, q, parts, residuals, positions, seeds, last, refusals, values, choices,
    vocabulary, tiles_per_split,
    ROUNDS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """One tree and one share of the vocabulary: the best of what is left of p over its noise."""
    tree, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_splits = tl.num_programs(1)
    seed, node = tl.load(seeds + tree), tl.load(last + tree)
    position, refused = tl.load(positions + node), tl.load(refusals + tree)
    sums = ()
    for turn in tl.static_range(ROUNDS):
        rest = _sum_of(parts, node, turn, num_splits, ROUNDS, BLOCK_SPLITS)
        sums = _and_one(sums, rest)
    past = refused > ROUNDS
    source = tl.where(past, residuals + tree * vocabulary, p + node * vocabulary)
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], -1.0, dtype=tl.float32)
    where = tl.full([LANES], 0, dtype=tl.int32) + NONE
    first = split * tiles_per_split
    stop = tl.minimum(first + tiles_per_split, tl.cdiv(vocabulary, TILE))
    for tile in range(first, stop):
        drawn = noise.words(seed, position, tile * LANES + lane, noise.RESIDUAL)
        for word in tl.static_range(4):
            token = tile * TILE + word * LANES + lane
            inside = token < vocabulary
            weight = tl.load(source + token, mask=inside, other=0.0)
            minus = tl.load(q + node * vocabulary + token, mask=inside, other=0.0)
            known, _ = _left(weight, minus, sums, refused, ROUNDS)
            weight = tl.where(past, weight, known)
            value = tl.div_rn(weight, noise.exponential(drawn[word]))
            better = inside & (value > best)
            best = tl.where(better, value, best)
            where = tl.where(better, token, where)
    peak = tl.max(best, 0)
    tl.store(values + tree * num_splits + split, peak)
    tl.store(choices + tree * num_splits + split, tl.min(tl.where(best == peak, where, NONE), 0))


@triton.jit
def pick_kernel(values, choices, bonus, num_splits, BLOCK_SPLITS: tl.constexpr):
    """One tree: the best over all shares."""
    tree = tl.program_id(0).to(tl.int64)
    chosen = chosen_of(values, choices, tree, num_splits, BLOCK_SPLITS)
    tl.store(bonus + tree, chosen.to(tl.int64))


def accept_drawn(p: Tensor, q: Tensor, tree: TokenTree, keys: Keys, max_depth: int) -> Walk:
    """As `accept_reference.accept_drawn`, ROUNDS + 3 launches."""
    (rows, vocabulary), trees, device = p.shape, tree.num_trees, p.device
    p, q, positions = p.contiguous(), q.contiguous(), keys.positions(tree)
    tiles = triton.cdiv(vocabulary, TILE)
    splits = min(tiles, MAX_SPLITS)
    per_split = triton.cdiv(tiles, splits)
    width = triton.next_power_of_2(splits)
    kinds, has_kinds = tree.ends if tree.kinds is None else tree.kinds, tree.kinds is not None
    parts = torch.empty(rows, ROUNDS, splits, device=device)
    for turn in range(ROUNDS):
        rest_kernel[rows, splits](
            p, q, tree.ends, kinds, parts, vocabulary, per_split, TURN=turn, ROUNDS=ROUNDS,
            TILE=TILE, BLOCK_SPLITS=width, HAS_KINDS=has_kinds, enable_fp_fusion=False,
        )  # fmt: skip
    walk = empty_walk(trees, max_depth, device)
    residuals = torch.empty(trees, vocabulary, device=device)
    last, refusals = torch.empty(2, trees, dtype=torch.int64, device=device)
    drawn_walk_kernel[(trees,)](
        p, q, parts, residuals, tree.tokens, tree.ends, kinds, positions, keys.seeds, tree.offsets,
        walk.nodes, walk.lengths, last, refusals, vocabulary, splits, max_depth, ROUNDS=ROUNDS,
        TILE=TILE, BLOCK_SPLITS=width, HAS_KINDS=has_kinds, enable_fp_fusion=False,
    )  # fmt: skip
    values = torch.empty(trees, splits, device=device)
    choices = torch.empty(trees, splits, dtype=torch.int32, device=device)
    bonus_kernel[trees, splits](
        p, q, parts, residuals, positions, keys.seeds, last, refusals, values, choices,
        vocabulary, per_split, ROUNDS=ROUNDS, LANES=LANES, TILE=TILE, BLOCK_SPLITS=width,
        enable_fp_fusion=False,
    )  # fmt: skip
    pick_kernel[(trees,)](values, choices, walk.bonus, splits, BLOCK_SPLITS=width)
    return walk
