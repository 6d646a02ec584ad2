"""Which items a request allows, as leaves of the trie: no beam is spent on a subtree that the
filter empties. What the catalogue version hides is left out in the same way.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.leaf_filter import LeafFilter
from recserve.kernels.trie_overlay import AnyTrie


def leaf_filter(
    trie: AnyTrie, excluded: np.ndarray | None, allowed: np.ndarray | None
) -> LeafFilter | None:
    """Filter of one request; None where it allows everything.

    excluded: [X] item rows, duplicates allowed. allowed: [I] bool over item rows.
    Raises ValueError for a row outside the catalogue or a bitmap of another length.
    """
    hidden = trie.hidden
    if excluded is not None and excluded.size:
        low, high = int(excluded.min()), int(excluded.max())
        if low < 0 or high >= trie.num_rows:
            raise ValueError(f"excluded rows span {low}..{high}; the catalogue has {trie.num_rows}")
    if allowed is not None:
        if allowed.shape != (trie.num_rows,):
            raise ValueError(f"allowed is {allowed.shape}; the catalogue has {trie.num_rows} items")
        kept = on_device(allowed, trie.device)[trie.leaf_rows]
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


def _ranks(trie: AnyTrie, rows: np.ndarray) -> Tensor:
    """Leaf ranks of the different item rows, the number of items for one without a leaf."""
    ranks = trie.leaf_ranks(on_device(np.unique(rows), trie.device, torch.int64)).long()
    return torch.where(ranks >= 0, ranks, trie.num_items)
