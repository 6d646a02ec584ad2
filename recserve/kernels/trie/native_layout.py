"""Lays out trie nodes that are scored next as token trees, on a CPU in C.

One C call replaces a hundred small torch operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.cpu.native import N, P, compiled
from recserve.kernels.tree import TokenTree
from recserve.kernels.trie.native_trie import NativeTrie, Prefixes

# which beams: with a child, with several children, with several items
ALIVE, FORKED, OPEN = range(3)


@dataclass(frozen=True)
class Laid:
    """Token trees of a set of trie nodes.

    `queries` and `slots` are None if no node was scored before; then every node is a query.

    Attributes:
        tree: The trees; their tokens are the model's.
        query_keys: [Tq] keys of the nodes that were not scored before.
        query_tokens: [Tq] tokens of these nodes.
        queries: [Tq] packed indices of these nodes.
        slots: [T] slots of nodes that were scored before, -1 for the others.
    """

    tree: TokenTree
    query_keys: Tensor
    query_tokens: Tensor
    queries: Tensor | None = None
    slots: Tensor | None = None


class _Wanted(ctypes.Structure):
    _fields_ = [
        ("trie", P),
        *((name, N) for name in ("batch", "columns", "level", "which")),
        *((name, P) for name in ("log_probs", "paths")),
        *((name, N) for name in ("path_request", "path_beam")),
        ("scored_keys", P),
        ("num_scored", N),
        *((name, P) for name in ("below", "keys")),
    ]


class _Layout(ctypes.Structure):
    _fields_ = [
        ("trie", P),
        *((name, N) for name in ("num_trees", "num_keys")),
        *((name, P) for name in ("keys", "tokens", "scored_keys", "scored_slots")),
        ("num_scored", N),
        *((name, P) for name in ("node_tokens", "parents", "depths", "ends", "offsets")),
        ("query_keys", P),
        ("num_queries", N),
        *((name, P) for name in ("slots", "query_tokens", "queries")),
    ]


def wanted_prefixes(
    trie: NativeTrie, beams: Prefixes, which: int, scored_keys: Tensor, below: Sequence[int]
) -> Tensor:
    """Returns the keys [n] of beams to score, each with all nodes above it.

    Args:
        trie: The catalogue's trie.
        beams: Beams of one level.
        which: Which beams to score: ALIVE, FORKED or OPEN.
        scored_keys: [m] ascending keys of prefixes that are already scored.
        below: [B] number of prefixes with several items below the beams to score as well. Those of
            better beams come first.
    """
    paths, log_probs = beams.paths, beams.log_probs.contiguous()
    limits = (N * len(below))(*below)
    keys = torch.empty(paths.numel() + sum(below), dtype=torch.int64)
    wanted = _Wanted(
        trie.address,
        *paths.shape,
        which,
        log_probs.data_ptr(),
        paths.data_ptr(),
        *beams.distances,
        scored_keys.data_ptr(),
        scored_keys.shape[0],
        ctypes.addressof(limits),
        keys.data_ptr(),
    )
    return keys[: compiled().wanted_prefixes(ctypes.addressof(wanted))]


def lay_out(
    trie: NativeTrie,
    keys: Tensor,
    num_trees: int,
    level_offsets: Tensor,
    scored_keys: Tensor,
    scored_slots: Tensor,
) -> Laid:
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
    keys, count, known = keys.contiguous(), keys.shape[0], scored_keys.shape[0]
    found = torch.empty(8 if known else 5, count, dtype=torch.int64)
    offsets = torch.empty(num_trees + 1, dtype=torch.int64)
    places = [found.data_ptr() + 8 * count * column for column in range(8)]
    layout = _Layout(
        trie.address,
        num_trees,
        count,
        keys.data_ptr(),
        level_offsets.data_ptr(),
        scored_keys.data_ptr(),
        scored_slots.data_ptr(),
        known,
        *places[:4],
        offsets.data_ptr(),
        places[4],
        0,
        *places[5:],
    )
    nodes = compiled().trie_layout(ctypes.addressof(layout))
    tokens, parents, depths, ends, query_keys, *more = found[:, :nodes].unbind()
    tree = TokenTree(tokens, parents, depths, ends, offsets)
    if not known:
        return Laid(tree, query_keys, tokens)
    slots, query_tokens, queries = more
    own = layout.num_queries
    return Laid(tree, query_keys[:own], query_tokens[:own], queries[:own], slots)
