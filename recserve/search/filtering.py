"""Which items a request allows, as leaves of the trie: no beam is spent on a subtree that the
filter empties. What the catalogue version hides is left out in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from recserve.core.allowed import AllowedItems, is_gone
from recserve.kernels.host import on_device
from recserve.kernels.trie.leaf_filter import LeafFilter
from recserve.kernels.trie.trie_view import TrieView, hidden_leaves

NOTHING = np.empty(0, np.int64)


def leaf_filter(
    trie: TrieView, excluded: np.ndarray | None, allowed: AllowedItems | None
) -> LeafFilter | None:
    """Filter of one request; None where it allows everything.

    excluded: [X] item rows, duplicates allowed. Costs what is excluded, if the allowed leaves were
    asked for before. Raises ValueError for a row outside the catalogue or items of another version.
    """
    _check(trie, excluded)
    leaves = None if allowed is None else allowed.leaves(trie)
    hidden = hidden_leaves(trie) if leaves is None else leaves.removed
    lists = () if hidden is None or not hidden.shape[0] else (hidden,)
    if excluded is not None and excluded.size:
        rows = np.unique(excluded)
        kept = ~is_gone(trie, rows)
        if allowed is not None:
            kept &= allowed.at(rows)
        lists = (*lists, _ranks(trie, rows[kept]))
    if leaves is not None:
        return LeafFilter(lists, leaves.base.bits, leaves.added)
    return LeafFilter(lists) if lists else None


def excluded_ranks(trie: TrieView, lists: Seq[np.ndarray | None], past: int) -> Tensor | None:
    """[B, X] int64 leaf ranks that requests without a bitmap leave out, ascending and each once,
    filled up with `past`; in a few operators, however many requests. None: nobody leaves one out.

    lists: excluded item rows of each request, as for `leaf_filter`, and the same errors.
    """
    hidden, own = (
        hidden_leaves(trie),
        [NOTHING if rows is None else np.unique(rows) for rows in lists],
    )
    width = max(rows.size for rows in own)
    if not width and hidden is None:
        return None
    table = np.full((len(own), width), -1, np.int64)
    for row, rows in zip(table, own, strict=True):
        _check(trie, rows)
        row[: rows.size] = rows
    asked = on_device(table, trie.device)
    ranks = trie.leaf_ranks(asked.clamp(min=0)).long()
    ranks = torch.where((asked >= 0) & (ranks >= 0), ranks, past)
    if hidden is not None:
        ranks = torch.cat([ranks, hidden.expand(len(own), -1)], dim=1).sort(1).values
        ranks[:, 1:] = torch.where(ranks[:, 1:] == ranks[:, :-1], past, ranks[:, 1:])
    return ranks.sort(1).values


def _check(trie: TrieView, excluded: np.ndarray | None) -> None:
    if excluded is None or not excluded.size:
        return
    low, high = int(excluded.min()), int(excluded.max())
    if low < 0 or high >= trie.num_rows:
        raise ValueError(f"excluded rows span {low}..{high}; the catalogue has {trie.num_rows}")


def _ranks(trie: TrieView, rows: np.ndarray) -> Tensor:
    """Ascending leaf ranks of item rows, the number of items for one without a leaf."""
    ranks = trie.leaf_ranks(on_device(rows, trie.device, torch.int64)).long()
    return torch.where(ranks >= 0, ranks, trie.num_items).sort().values
