"""Acceptance in Triton: the tokens drawn at all nodes, then one walk per tree, no host sync.

    chosen_i = argmax_v (logits[i, v] / temperature + gumbel(seed, position_i, v))
    walk: from the root node to the child that carries the chosen token, while there is one

Bytes moved: the logits once (T V elements; the noise is computed, not read), split over programs
so that few nodes of a large vocabulary still fill the device; then per accepted node its subtree's
parents and tokens. With draft probabilities: two numbers per child tried, and p, q and the residual
(12 V bytes) per refusal. Twins: accept_reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels import noise_kernel as noise
from recserve.kernels.accept_reference import Keys, Walk
from recserve.kernels.noise import LANES, TILE
from recserve.kernels.tree import TokenTree

BLOCK_NODES = 128
BLOCK_TILES = 4
MAX_SPLITS = 64
NONE = tl.constexpr(2**31 - 1)


@triton.jit
def choose_kernel(
    logits, seeds, positions, trees, temperatures, values, tokens,
    vocabulary, tiles_per_split, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One node and one share of the vocabulary: its best value and token."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tree = tl.load(trees + row)
    seed, position = tl.load(seeds + tree), tl.load(positions + row)
    temperature = tl.load(temperatures + tree)
    warm = temperature > 0
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), dtype=tl.float32)
    where = tl.full([LANES], 0, dtype=tl.int32) + NONE
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(vocabulary, TILE))
    for tile in range(first, last):
        drawn = noise.words(seed, position, tile * LANES + lane, noise.TARGET)
        for word in tl.static_range(4):
            token = tile * TILE + word * LANES + lane
            value = tl.load(
                logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")
            ).to(tl.float32)
            if warm:
                value = tl.div_rn(value, temperature) + noise.gumbel(drawn[word])
            better = value > best
            best = tl.where(better, value, best)
            where = tl.where(better, token, where)
    peak = tl.max(best, 0)
    place = row * tl.num_programs(1) + split
    tl.store(values + place, peak)
    tl.store(tokens + place, tl.min(tl.where(best == peak, where, NONE), 0))


@triton.jit
def _chosen(values, tokens, node, num_splits, BLOCK_SPLITS: tl.constexpr):
    """Best token over the shares of one node's vocabulary, the lowest on ties."""
    split = tl.arange(0, BLOCK_SPLITS)
    valid = split < num_splits
    place = node * num_splits + split
    value = tl.load(values + place, mask=valid, other=float("-inf"))
    token = tl.load(tokens + place, mask=valid, other=NONE)
    return tl.min(tl.where(value == tl.max(value, 0), token, NONE), 0)


@triton.jit
def walk_kernel(
    values, choices, tree_tokens, parents, ends, kinds, offsets, nodes, lengths, bonus,
    num_splits, max_depth,
    BLOCK_SPLITS: tl.constexpr, BLOCK_NODES: tl.constexpr, HAS_KINDS: tl.constexpr,
):  # fmt: skip
    """One tree, from its root node down."""
    tree = tl.program_id(0).to(tl.int64)
    node = tl.load(offsets + tree)
    out = nodes + tree * (max_depth + 1)
    tl.store(out, node)
    chosen = _chosen(values, choices, node, num_splits, BLOCK_SPLITS)
    length = tree * 0
    alive = length == 0
    for depth in range(1, max_depth + 1):
        stop = tl.where(alive, tl.load(ends + node), node)
        found = tree * 0 + NONE
        for start in range(node + 1, stop, BLOCK_NODES):
            place = start + tl.arange(0, BLOCK_NODES)
            inside = place < stop
            match = tl.load(parents + place, mask=inside, other=-1) == node
            match = match & (tl.load(tree_tokens + place, mask=inside, other=-1) == chosen)
            if HAS_KINDS:
                match = match & (tl.load(kinds + place, mask=inside, other=1) == 0)
            found = tl.minimum(found, tl.min(tl.where(match, place, NONE), 0))
        alive = found < NONE
        node = tl.where(alive, found, node)
        tl.store(out + depth, tl.where(alive, node, -1))
        length += alive.to(tl.int64)
        chosen = _chosen(values, choices, node, num_splits, BLOCK_SPLITS)
    tl.store(lengths + tree, length)
    tl.store(bonus + tree, chosen.to(tl.int64))


def accept(
    logits: Tensor, tree: TokenTree, keys: Keys, temperatures: Tensor, max_depth: int
) -> Walk:
    """As `accept_reference.accept`, two launches."""
    rows, vocabulary = logits.shape
    device, trees = logits.device, tree.num_trees
    tiles = triton.cdiv(vocabulary, TILE)
    splits = min(triton.cdiv(tiles, BLOCK_TILES), MAX_SPLITS)
    per_split = triton.cdiv(tiles, splits)
    values = torch.empty(rows, splits, device=device)
    tokens = torch.empty(rows, splits, dtype=torch.int32, device=device)
    choose_kernel[rows, splits](
        logits.contiguous(), keys.seeds, keys.positions(tree), tree.tree_ids(), temperatures,
        values, tokens, vocabulary, per_split,
        LANES=LANES, TILE=TILE, enable_fp_fusion=False,
    )  # fmt: skip
    walk = _empty_walk(trees, max_depth, device)
    walk_kernel[(trees,)](
        values, tokens, tree.tokens, tree.parents, tree.ends,
        tree.parents if tree.kinds is None else tree.kinds, tree.offsets,
        walk.nodes, walk.lengths, walk.bonus, splits, max_depth,
        BLOCK_SPLITS=triton.next_power_of_2(splits), BLOCK_NODES=BLOCK_NODES,
        HAS_KINDS=tree.kinds is not None,
    )  # fmt: skip
    return walk


def _empty_walk(trees: int, max_depth: int, device: torch.device) -> Walk:
    return Walk(
        torch.empty(trees, max_depth + 1, dtype=torch.int64, device=device),
        torch.empty(trees, dtype=torch.int64, device=device),
        torch.empty(trees, dtype=torch.int64, device=device),
    )


@triton.jit
def drawn_kernel(
    p, q, residuals, tokens, ends, kinds, positions, seeds, offsets, nodes, lengths, bonus,
    vocabulary, max_depth,
    LANES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, HAS_KINDS: tl.constexpr,
):  # fmt: skip
    """One tree: children tried in order, the residual kept beside, the bonus drawn at the end.

    The residual is kept unnormalised with its sum; where nothing was refused yet p itself is it.
    """
    tree = tl.program_id(0).to(tl.int64)
    seed, node = tl.load(seeds + tree), tl.load(offsets + tree)
    out, residual = nodes + tree * (max_depth + 1), residuals + tree * vocabulary
    tl.store(out, node)
    lane = tl.arange(0, TILES * LANES)
    length = tree * 0
    source, total = p + node * vocabulary, 1.0
    accepted = node
    while accepted >= 0:
        source, total = p + node * vocabulary, 1.0
        position, draft = tl.load(positions + node), q + node * vocabulary
        accepted = node * 0 - 1
        tried = tree.to(tl.int32) * 0
        child, stop = node + 1, tl.load(ends + node)
        while child < stop:
            kind = node * 0
            if HAS_KINDS:
                kind = tl.load(kinds + child)
            if kind == 0:
                token = tl.load(tokens + child)
                coin = noise.uniform(seed, position, tried, noise.ACCEPT)
                share = tl.div_rn(tl.load(source + token), total)
                if coin * tl.load(draft + token) < share:
                    accepted = child
                else:
                    rest = 0.0
                    for start in range(0, vocabulary, 4 * TILES * LANES):
                        for part in tl.static_range(4):
                            column = start + part * TILES * LANES + lane
                            inside = column < vocabulary
                            weight = tl.load(source + column, mask=inside, other=0.0)
                            drawn = tl.load(draft + column, mask=inside, other=0.0)
                            weight = tl.maximum(tl.div_rn(weight, total) - drawn, 0.0)
                            tl.store(residual + column, weight, mask=inside)
                            rest += tl.sum(weight, 0)
                    tl.debug_barrier()
                    # p and q equal but for rounding: a refusal says nothing about p.
                    source = tl.where(rest > 0, residual, p + node * vocabulary)
                    total = tl.where(rest > 0, rest, 1.0)
                tried += 1
            child = tl.where(accepted >= 0, stop, tl.load(ends + child))
        if accepted >= 0:
            node = accepted
            length += 1
            tl.store(out + length, node)
    for depth in range(length + 1, max_depth + 1):
        tl.store(out + depth, -1)
    position = tl.load(positions + node)
    best = tl.full([TILES * LANES], -1.0, dtype=tl.float32)
    where = tl.full([TILES * LANES], 0, dtype=tl.int32)
    for start in range(0, tl.cdiv(vocabulary, TILE), TILES):
        block = start * LANES + lane
        drawn = noise.words(seed, position, block, noise.RESIDUAL)
        for word in tl.static_range(4):
            token = block // LANES * TILE + word * LANES + block % LANES
            weight = tl.load(source + token, mask=token < vocabulary, other=-1.0)
            value = tl.div_rn(weight, noise.exponential(drawn[word]))
            value = tl.where(weight < 0, -1.0, value)
            better = value > best
            best = tl.where(better, value, best)
            where = tl.where(better, token, where)
    peak = tl.max(best, 0)
    tl.store(bonus + tree, tl.min(tl.where(best == peak, where, NONE), 0).to(tl.int64))
    tl.store(lengths + tree, length)


def accept_drawn(p: Tensor, q: Tensor, tree: TokenTree, keys: Keys, max_depth: int) -> Walk:
    """As `accept_reference.accept_drawn`, one launch."""
    vocabulary, trees = p.shape[1], tree.num_trees
    walk = _empty_walk(trees, max_depth, p.device)
    drawn_kernel[(trees,)](
        p.contiguous(), q.contiguous(), torch.empty(trees, vocabulary, device=p.device),
        tree.tokens, tree.ends, tree.tokens if tree.kinds is None else tree.kinds,
        keys.positions(tree), keys.seeds, tree.offsets, walk.nodes, walk.lengths, walk.bonus,
        vocabulary, max_depth,
        LANES=LANES, TILE=TILE, TILES=BLOCK_TILES, HAS_KINDS=tree.kinds is not None,
        enable_fp_fusion=False,
    )  # fmt: skip
    return walk
