"""What of the trie is scored next, as token trees, on a CPU in C: what a hundred small operators of
torch do otherwise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.native import N, P, compiled
from recserve.kernels.native_trie import NativeTrie
from recserve.kernels.tree import TokenTree

ALIVE, FORKED, OPEN = range(3)  # which beams: with a child, several children, several items


@dataclass(frozen=True)
class Laid:
    """tree: its tokens are the model's. slots [T]: of nodes that were scored before, -1 of others.
    queries [Tq]: those others, with their tokens and keys.
    """

    tree: TokenTree
    slots: Tensor
    queries: Tensor
    query_tokens: Tensor
    query_keys: Tensor


@dataclass(frozen=True)
class Prefixes:
    """Beams of one level. nodes [B, W] int64, log_probs [B, W], paths [B, W, level] int64."""

    nodes: Tensor
    log_probs: Tensor
    paths: Tensor


class _Wanted(ctypes.Structure):
    _fields_ = [
        ("trie", P),
        *((name, N) for name in ("batch", "columns", "level", "which")),
        *((name, P) for name in ("nodes", "paths", "log_probs", "scored_keys")),
        ("num_scored", N),
        *((name, P) for name in ("below", "keys", "open")),
    ]


class _Layout(ctypes.Structure):
    _fields_ = [
        ("trie", P),
        *((name, N) for name in ("num_trees", "num_keys")),
        *((name, P) for name in ("keys", "tokens", "scored_keys", "scored_slots")),
        ("num_scored", N),
        *((name, P) for name in ("node_tokens", "parents", "depths", "ends", "offsets", "slots")),
        *((name, P) for name in ("queries", "query_tokens", "query_keys")),
        ("num_queries", N),
    ]


def wanted_prefixes(
    trie: NativeTrie, beams: Prefixes, which: int, scored_keys: Tensor, below: Sequence[int]
) -> Tensor:
    """[n] keys of the beams that are wanted and not scored, each with all above it.

    which: ALIVE, FORKED or OPEN. scored_keys [m]: ascending. below [B]: up to so many prefixes with
    several items below the beams are wanted too, those of better beams first.
    """
    nodes, paths = beams.nodes.contiguous(), beams.paths.contiguous()
    log_probs, scored_keys = beams.log_probs.contiguous(), scored_keys.contiguous()
    limits = (N * len(below))(*below)
    keys = torch.empty(paths.numel() + sum(below), dtype=torch.int64)
    rest = torch.empty(max(below), dtype=torch.int64)
    wanted = _Wanted(
        trie.address,
        *paths.shape,
        which,
        nodes.data_ptr(),
        paths.data_ptr(),
        log_probs.data_ptr(),
        scored_keys.data_ptr(),
        scored_keys.shape[0],
        ctypes.addressof(limits),
        keys.data_ptr(),
        rest.data_ptr(),
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
    """One token tree per request.

    keys [n] int64: `tree number * nodes of the trie + trie node`, duplicates allowed; with a node
    all nodes above it (but node 0). level_offsets [L] int64: first token of each level.
    scored_keys [m] ascending, scored_slots [m]: nodes that were scored before.
    """
    inputs = [x.contiguous() for x in (keys, level_offsets, scored_keys, scored_slots)]
    count = keys.shape[0]
    columns = torch.empty(8, max(count, 1), dtype=torch.int64)
    offsets = torch.empty(num_trees + 1, dtype=torch.int64)
    node_tokens, parents, depths, ends, slots, *query_columns = columns
    found = [node_tokens, parents, depths, ends, offsets, slots, *query_columns]
    layout = _Layout(
        trie.address,
        num_trees,
        count,
        *(x.data_ptr() for x in inputs),
        scored_keys.shape[0],
        *(x.data_ptr() for x in found),
    )
    nodes = compiled().trie_layout(ctypes.addressof(layout))
    tree = TokenTree(node_tokens[:nodes], parents[:nodes], depths[:nodes], ends[:nodes], offsets)
    queries, tokens, query_keys = (column[: layout.num_queries] for column in query_columns)
    return Laid(tree, slots[:nodes], queries, tokens, query_keys)
