"""Which items a request allows, as leaves of the trie: no beam is spent on a subtree that the
filter empties. What the catalogue version hides is left out in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.leaf_filter import LeafFilter
from recserve.kernels.trie_overlay import AnyTrie

NOTHING = np.empty(0, np.int64)


def leaf_filter(
    trie: AnyTrie, excluded: np.ndarray | None, allowed: np.ndarray | None
) -> LeafFilter | None:
    """Filter of one request; None where it allows everything.

    excluded: [X] item rows, duplicates allowed. allowed: [I] bool over item rows.
    Raises ValueError for a row outside the catalogue or a bitmap of another length.
    """
    hidden = trie.hidden
    _check(trie, excluded)
    if allowed is not None:
        if allowed.shape != (trie.num_rows,):
            raise ValueError(f"allowed is {allowed.shape}; the catalogue has {trie.num_rows} items")
        kept = on_device(allowed, trie.device).index_select(0, trie.leaf_rows)
        if excluded is not None and excluded.size:
            kept = torch.cat([kept, kept[:1]]).index_fill_(0, _ranks(trie, excluded), False)[:-1]
        if hidden is not None:
            kept.index_fill_(0, hidden, False)
        zero = torch.zeros(1, dtype=torch.int64, device=trie.device)
        return LeafFilter((), torch.cat([zero, kept.cumsum(0)]))
    lists = () if hidden is None else (hidden,)
    if excluded is not None and excluded.size:
        ranks = _ranks(trie, excluded)
        if hidden is not None:
            at = torch.searchsorted(hidden, ranks).clamp(max=hidden.shape[0] - 1)
            ranks = torch.where(hidden[at] == ranks, trie.num_items, ranks)
        lists = (*lists, torch.sort(ranks).values)
    return LeafFilter(lists) if lists else None


def excluded_ranks(trie: AnyTrie, lists: Seq[np.ndarray | None], past: int) -> Tensor | None:
    """[B, X] int64 leaf ranks that requests without a bitmap leave out, ascending and each once,
    filled up with `past`; in a few operators, however many requests. None: nobody leaves one out.

    lists: excluded item rows of each request, as for `leaf_filter`, and the same errors.
    """
    hidden, own = trie.hidden, [NOTHING if rows is None else np.unique(rows) for rows in lists]
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


def _check(trie: AnyTrie, excluded: np.ndarray | None) -> None:
    if excluded is None or not excluded.size:
        return
    low, high = int(excluded.min()), int(excluded.max())
    if low < 0 or high >= trie.num_rows:
        raise ValueError(f"excluded rows span {low}..{high}; the catalogue has {trie.num_rows}")


def _ranks(trie: AnyTrie, rows: np.ndarray) -> Tensor:
    """Leaf ranks of the different item rows, the number of items for one without a leaf."""
    ranks = trie.leaf_ranks(on_device(np.unique(rows), trie.device, torch.int64)).long()
    return torch.where(ranks >= 0, ranks, trie.num_items)
