"""Acceptance in Triton: the tokens drawn at all nodes, then one walk per tree, without host sync.

    chosen_i = argmax_v (logits[i, v] / temperature + gumbel(seed, position_i, v))
    walk: from the root node to the child that carries the chosen token, while there is one

Bytes moved: the logits once (T V elements), because the noise is computed and not read. They are
split over programs, so that few nodes of a large vocabulary still fill the device. Each accepted
node adds the parents and tokens of its subtree. Reference: acceptance.accept_reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels.acceptance import triton_noise as noise
from recserve.kernels.acceptance.acceptance import Keys, Walk
from recserve.kernels.acceptance.noise import LANES, TILE
from recserve.kernels.tree import TokenTree

BLOCK_NODES = 128
BLOCK_TILES = 4
FEW_NODES = 8  # up to so many nodes, each tile of the vocabulary is one program
MAX_SPLITS = 256
NONE = tl.constexpr(2**31 - 1)
# These arguments differ from step to step: numbers that are sometimes 1 or a multiple of 16, and
# slices that are sometimes aligned. They are not specialised, so one compiled kernel serves all.
COUNTS = ["tiles_per_split", "num_splits", "max_depth"]
TABLES = [
    *("seeds", "prefix_lengths", "temperatures", "offsets", "positions", "trees"),
    *("tree_tokens", "tokens", "parents", "ends", "kinds", "rows", "nodes", "lengths", "bonus"),
]


@triton.jit
def tiles_of(split, tiles_per_split, vocabulary, TILE: tl.constexpr):
    """Returns the first tile of one split of a vocabulary, and one past its last."""
    first = split * tiles_per_split
    return first, tl.minimum(first + tiles_per_split, tl.cdiv(vocabulary, TILE))


@triton.jit
def better(value, token, best, where):
    """Returns the best value of every lane and its token; ties go to the earlier token."""
    return tl.maximum(best, value), tl.where(value > best, token, where)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def choose_kernel(
    logits, seeds, positions, trees, temperatures, values, tokens,
    vocabulary, tiles_per_split, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Finds the best value and token of one node in one split of the vocabulary."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tree = tl.load(trees + row)
    seed, position = tl.load(seeds + tree), tl.load(positions + row)
    temperature = tl.load(temperatures + tree)
    warm = temperature > 0
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), dtype=tl.float32)
    where = tl.full([LANES], 0, dtype=tl.int32) + NONE
    first, last = tiles_of(split, tiles_per_split, vocabulary, TILE)
    for tile in range(first, last):
        drawn = noise.words(seed, position, tile * LANES + lane, noise.TARGET)
        for word in tl.static_range(4):
            token = tile * TILE + word * LANES + lane
            value = tl.load(
                logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")
            ).to(tl.float32)
            if warm:
                value = tl.div_rn(value, temperature) + noise.gumbel_of_words(drawn[word])
            best, where = better(value, token, best, where)
    peak = tl.max(best, 0)
    place = row * tl.num_programs(1) + split
    tl.store(values + place, peak)
    tl.store(tokens + place, tl.min(tl.where(best == peak, where, NONE), 0))


@triton.jit
def chosen_of(values, tokens, node, num_splits, BLOCK_SPLITS: tl.constexpr):
    """Returns the best token over all splits of one node's vocabulary, the lowest on ties."""
    split = tl.arange(0, BLOCK_SPLITS)
    valid = split < num_splits
    place = node * num_splits + split
    value = tl.load(values + place, mask=valid, other=float("-inf"))
    token = tl.load(tokens + place, mask=valid, other=NONE)
    return tl.min(tl.where(value == tl.max(value, 0), token, NONE), 0)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=TABLES)
def walk_kernel(
    values, choices, tree_tokens, parents, ends, kinds, offsets, nodes, lengths, bonus,
    num_splits, max_depth,
    BLOCK_SPLITS: tl.constexpr, BLOCK_NODES: tl.constexpr, HAS_KINDS: tl.constexpr,
):  # fmt: skip
    """Walks down one tree from its root node."""
    tree = tl.program_id(0).to(tl.int64)
    node = tl.load(offsets + tree)
    out = nodes + tree * (max_depth + 1)
    tl.store(out, node)
    chosen = chosen_of(values, choices, node, num_splits, BLOCK_SPLITS)
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
        chosen = chosen_of(values, choices, node, num_splits, BLOCK_SPLITS)
    tl.store(lengths + tree, length)
    tl.store(bonus + tree, chosen.to(tl.int64))


def accept(
    logits: Tensor, tree: TokenTree, keys: Keys, temperatures: Tensor, max_depth: int
) -> Walk:
    """Runs `acceptance.accept_reference` in two launches."""
    rows, vocabulary = logits.shape
    device, trees = logits.device, tree.num_trees
    splits, per_split = shares(vocabulary, 1 if rows <= FEW_NODES else BLOCK_TILES)
    values = torch.empty(rows, splits, device=device)
    tokens = torch.empty(rows, splits, dtype=torch.int32, device=device)
    choose_kernel[rows, splits](
        logits.contiguous(), keys.seeds, keys.positions(tree), tree.tree_ids(), temperatures,
        values, tokens, vocabulary, per_split,
        LANES=LANES, TILE=TILE, enable_fp_fusion=False,
    )  # fmt: skip
    walk = empty_walk(trees, max_depth, device)
    walk_kernel[(trees,)](
        values, tokens, tree.tokens, tree.parents, tree.ends,
        tree.parents if tree.kinds is None else tree.kinds, tree.offsets,
        walk.nodes, walk.lengths, walk.bonus, splits, max_depth,
        BLOCK_SPLITS=triton.next_power_of_2(splits), BLOCK_NODES=BLOCK_NODES,
        HAS_KINDS=tree.kinds is not None,
    )  # fmt: skip
    return walk


def shares(vocabulary: int, tiles: int) -> tuple[int, int]:
    """Splits a vocabulary into groups of tiles.

    Args:
        vocabulary: Number of tokens.
        tiles: Tiles per split. A split has more if there would be over MAX_SPLITS splits.

    Returns:
        Number of splits, and tiles of each.
    """
    every = triton.cdiv(vocabulary, TILE)
    splits = min(triton.cdiv(every, tiles), MAX_SPLITS)
    return splits, triton.cdiv(every, splits)


def empty_walk(trees: int, max_depth: int, device: torch.device) -> Walk:
    """Allocates the walks of this many trees."""
    return Walk(
        torch.empty(trees, max_depth + 1, dtype=torch.int64, device=device),
        torch.empty(trees, dtype=torch.int64, device=device),
        torch.empty(trees, dtype=torch.int64, device=device),
    )
