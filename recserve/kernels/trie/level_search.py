"""One level of beam search in the trie, and the token trees of the nodes that a round scores.

A child's score and node number are packed into one integer that orders by higher score, then by
lower node. So one top-k without ties selects the children.

Trie nodes become one token tree per request. A node's items are a range of leaf ranks. So (first
leaf, level) orders nodes in preorder, and a subtree ends where the first leaf passes the node's
last leaf.

Each operator has its reference here, and is in C (`native.py`) or Triton besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.backend import Operator
from recserve.kernels.host import on_device
from recserve.kernels.tree import TokenTree
from recserve.kernels.trie import native
from recserve.kernels.trie.native import BeamKind, PathTrees
from recserve.kernels.trie.trie import BatchFilter, LeafBits, Trie, pack_leaves

DEAD = float("-inf")
LOW = 0xFFFFFFFF
EVERYTHING = BatchFilter()


@dataclass(frozen=True)
class ChildQuery:
    """Beams of one level of a trie, and the number of children to select.

    Attributes:
        nodes: [B, W] trie nodes of the beams.
        log_probs: [B, W] float32 of the beams, -inf where a beam is dead.
        logits: [B * W, C] of the level's codes at each beam. A beam with one child may have any
            finite row.
        width: Most children of a node of this level (`Trie.widths`).
        keep: Children to select per request.
        normalizers: [B * W] subtracted from the logits. None means their log-sum-exp over the
            children of the beam, whether allowed or not.
        filters: Leaves that the requests allow.
    """

    nodes: Tensor
    log_probs: Tensor
    logits: Tensor
    width: int
    keep: int
    normalizers: Tensor | None = None
    filters: BatchFilter = EVERYTHING


@dataclass(frozen=True)
class BestChildren:
    """Beams of the next level, in descending order. Missing ones have log_probs -inf and zeros.

    Attributes:
        nodes: [B, k].
        parents: [B, k] the beam that each child belongs to.
        log_probs: [B, k].
    """

    nodes: Tensor
    parents: Tensor
    log_probs: Tensor


def best_children_reference(trie: Trie, query: ChildQuery) -> BestChildren:
    """Returns the `keep` best children of every request that have an allowed leaf."""
    nodes, width = query.nodes, query.width
    batch = nodes.shape[0]
    children = trie.children(nodes.flatten(), width)
    gain = query.logits.float().gather(1, children.codes.long())
    if query.normalizers is None:
        gain = gain.masked_fill(~children.valid, DEAD).log_softmax(-1)
    else:
        gain = gain - query.normalizers[:, None]
    total = (query.log_probs.flatten()[:, None] + gain).masked_fill(~children.valid, DEAD)
    total, child = total.view(batch, -1), children.nodes.view(batch, -1)
    left = query.filters.remaining(trie, child)
    if left is not None:
        total = total.masked_fill(left <= 0, DEAD)
    # A dead beam's children are -inf - x or NaN.
    return unpacked(packed(total.nan_to_num(DEAD, neginf=DEAD), child), width, query.keep)


best_children = Operator(
    best_children_reference,
    triton="recserve.kernels.trie.triton_topk:best_children",
    reads=lambda trie, query: query.nodes,
)


def unpacked(keys: Tensor, width: int, keep: int) -> BestChildren:
    """Selects the best of packed children. keys: [B, W * width], width children per beam."""
    kept, index = keys.topk(min(keep, keys.shape[1]), dim=1)
    ordered = (kept >> 32).int()
    log_probs = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    alive = log_probs > DEAD
    nodes = torch.where(alive, LOW - (kept & LOW), 0)
    parents = torch.where(alive, index // width, 0)
    return BestChildren(nodes, parents, torch.where(alive, log_probs, DEAD))


def packed(log_probs: Tensor, nodes: Tensor) -> Tensor:
    """Returns int64 keys that order by log-probability, then by the lower node. Same shapes."""
    bits = (log_probs + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (LOW - nodes.long())


def child_log_probs(
    trie: Trie,
    parents: Tensor,
    nodes: Tensor,
    logits: Tensor,
    width: int,
    normalizers: Tensor | None = None,
) -> Tensor:
    """Returns log-probabilities [n, m] of m children of each of n nodes.

    The result is undefined (a number or NaN) where a node is not a child of its parent.

    Args:
        trie: The catalogue's trie.
        parents: [n].
        nodes: [n, m].
        logits: [n, C], as in `ChildQuery`.
        width: As in `ChildQuery`.
        normalizers: [n], as in `ChildQuery`.
    """
    logits, last = logits.float(), logits.shape[1] - 1
    if normalizers is not None:
        codes = trie.codes_of(nodes).long().clamp(max=last)
        return logits.gather(1, codes) - normalizers[:, None]
    children = trie.children(parents, width)
    gain = logits.gather(1, children.codes.long().clamp(max=last))
    gain = gain.masked_fill(~children.valid, DEAD).log_softmax(-1)
    columns = trie.child_columns(nodes, parents[:, None].expand_as(nodes))
    return gain.gather(1, columns.long().clamp(0, width - 1))


def wanted_prefixes_reference(
    trie: Trie,
    log_probs: Tensor,
    paths: Tensor,
    which: BeamKind,
    scored_keys: Tensor,
    below: Sequence[int],
) -> Tensor:
    """Returns the keys [n] of beams to score, each with all nodes above it; repeats occur.

    A key is `request number * nodes of the trie + trie node`.

    Args:
        trie: The catalogue's trie.
        log_probs: [B, W] of the beams, -inf where there is no beam.
        paths: [B, W, level] int64 nodes on each beam's path; the last one is its own.
        which: Which beams to score: ALIVE, FORKED or OPEN.
        scored_keys: [m] ascending keys of paths that are already scored.
        below: [B] number of paths with several items below the beams to score as well. Those of
            better beams come first.
    """
    batch, width, level = paths.shape
    first = torch.arange(batch, device=paths.device)[:, None] * trie.num_nodes
    nodes = paths[..., -1] if level else torch.zeros_like(first).expand(batch, width)
    needed = log_probs > DEAD
    if which == BeamKind.FORKED:
        needed = needed & (trie.num_children(nodes) > 1)
    elif which == BeamKind.OPEN:
        leaves = trie.leaves(nodes)
        needed = needed & (leaves.last - leaves.first > 1)
    missing = needed & (find_keys(scored_keys, first + nodes) < 0)
    keys = (first[..., None] + paths)[missing].flatten()
    if not any(below):
        return keys
    return torch.cat([keys, _paths_below(trie, first + nodes, missing, level, below)])


wanted_prefixes = Operator(
    wanted_prefixes_reference,
    native.wanted_prefixes,
    reads=lambda trie, log_probs, paths, *rest: paths,
)


def _paths_below(
    trie: Trie, beams: Tensor, chosen: Tensor, level: int, most: Sequence[int]
) -> Tensor:
    """Returns the keys of paths with several items below the chosen beams [B, W].

    Paths below better beams come first.

    Args:
        trie: The catalogue's trie.
        beams: [B, W] keys of the beams.
        chosen: [B, W] bool.
        level: Length of the beams' paths.
        most: [B] most keys of each request.
    """
    size = trie.num_nodes
    above = chosen.flatten().nonzero().flatten()
    keys = beams.flatten()[above]
    found, beam = [keys[:0]], [above[:0]]
    for _ in range(level + 1, trie.num_levels):
        if not keys.shape[0]:
            break
        children = trie.children(keys % size)
        below = trie.leaves(children.nodes)
        row, column = (children.valid & (below.last - below.first > 1)).nonzero(as_tuple=True)
        keys = keys[row] // size * size + children.nodes[row, column]
        above = above[row]
        found.append(keys)
        beam.append(above)
    # Sort by beam (best first), then keep the first paths of each request.
    order = torch.sort(torch.cat(beam), stable=True)
    keys, owners = torch.cat(found)[order.indices], order.values // beams.shape[1]
    place = torch.arange(keys.shape[0], device=keys.device) - torch.searchsorted(owners, owners)
    return keys[place < on_device(most, keys.device)[owners]]


def lay_out_reference(
    trie: Trie,
    keys: Tensor,
    num_trees: int,
    level_offsets: Tensor,
    scored_keys: Tensor,
    scored_slots: Tensor,
) -> PathTrees:
    """Returns one token tree per request.

    Args:
        trie: The catalogue's trie.
        keys: [n] int64 `tree number * nodes of the trie + trie node`, duplicates allowed. All nodes
            above a node (except node 0) must be included.
        num_trees: B.
        level_offsets: [L] int64 first token of each level.
        scored_keys: [m] ascending keys of nodes that were scored before.
        scored_slots: [m] their slots.
    """
    keys, size = torch.unique(keys), trie.num_nodes
    owners, nodes = keys // size, keys % size
    depths, leaves = trie.levels(nodes) - 1, trie.leaves(nodes)
    spread = trie.num_items + 1
    first = owners * spread + leaves.first
    order = torch.sort(first * trie.num_levels + depths).indices
    owners, nodes, depths = owners[order], nodes[order], depths[order]
    ends = torch.searchsorted(first[order], owners * spread + leaves.last[order])
    index = torch.empty_like(order)
    index[order] = torch.arange(order.shape[0], device=order.device)
    above = torch.searchsorted(keys, owners * size + trie.parents_of(nodes))
    parents = torch.where(depths > 0, index[above.clamp(max=max(keys.shape[0] - 1, 0))], -1)
    offsets = torch.searchsorted(owners, torch.arange(num_trees + 1, device=keys.device))
    tokens, query_keys = level_offsets[depths] + trie.codes_of(nodes), keys[order]
    tree = TokenTree(tokens, parents, depths, ends, offsets)
    if not scored_keys.shape[0]:
        return PathTrees(tree, query_keys, tokens)
    # Scored nodes stay in the tree, since descendants attend to their slots; others are queries.
    row = find_keys(scored_keys, query_keys)
    slots = torch.where(row >= 0, scored_slots[row.clamp(min=0)], -1)
    queries = (slots < 0).nonzero().flatten()
    return PathTrees(tree, query_keys[queries], tokens[queries], queries, slots)


lay_out = Operator(lay_out_reference, native.lay_out, reads=lambda trie, keys, *rest: keys)


def find_keys(ascending: Tensor, keys: Tensor) -> Tensor:
    """Returns the position of each key among ascending ones [n], -1 where it is not there."""
    if not ascending.shape[0]:
        return torch.full_like(keys, -1)
    row = torch.searchsorted(ascending, keys).clamp(max=ascending.shape[0] - 1)
    return torch.where(ascending[row] == keys, row, -1)


def scored_table_reference(
    keys: Tensor,
    slots: Tensor,
    hidden: Tensor,
    added_keys: Tensor,
    added_slots: Tensor,
    added_hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Merges m more paths into a table of scored ones. No key occurs in both.

    Args:
        keys: [n] ascending keys of the table.
        slots: [n] pool slot of each path.
        hidden: [n, E] hidden state of each path.
        added_keys: [m] keys in any order.
        added_slots: [m] their slots.
        added_hidden: [m, E] their states.

    Returns:
        Keys [n + m] in ascending order, their slots and their states.
    """
    keys, order = torch.sort(torch.cat([keys, added_keys]))
    slots = torch.cat([slots, added_slots])[order]
    return keys, slots, torch.cat([hidden, added_hidden])[order]


scored_table = Operator(
    scored_table_reference, native.scored_table, reads=lambda *columns: columns[5]
)


def leaf_bits_reference(rows: np.ndarray, leaf_rows: Tensor) -> LeafBits:
    """Converts a bit set of item rows to the bits of a trie's leaves (one row of `LeafBits`).

    Args:
        rows: [n / 8] uint8, a bit for each item row, little-endian.
        leaf_rows: [I] int32 item row of each leaf.
    """
    every = on_device(np.unpackbits(rows, bitorder="little"), leaf_rows.device)
    return pack_leaves(every.index_select(0, leaf_rows)[None] > 0)


leaf_bits = Operator(leaf_bits_reference, native.leaf_bits, reads=lambda rows, leaf_rows: leaf_rows)
