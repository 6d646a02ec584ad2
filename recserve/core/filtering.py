"""Which items a request allows, counted at every prefix of the trie.

Leaves are numbered in trie order, so the items under a prefix are a range of leaf ranks and the
allowed
ones among them are a difference of two counts: no beam is spent on a subtree that the filter
empties.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.trie import Trie


@dataclass(frozen=True)
class LeafFilter:
    """Allowed leaves, in the cheaper of two forms.

    excluded [X]: sorted ranks of the leaves that are not allowed. before [I + 1]: allowed leaves
    before each rank; used instead of `excluded` when the request allows by bitmap.
    """

    excluded: Tensor | None
    before: Tensor | None

    def remaining(self, first: Tensor, last: Tensor) -> Tensor:
        """Allowed leaves in the ranges `first : last`, any shape."""
        if self.before is not None:
            return self.before[last] - self.before[first]
        assert self.excluded is not None
        gone = torch.searchsorted(self.excluded, last) - torch.searchsorted(self.excluded, first)
        return (last - first) - gone


def leaf_filter(
    trie: Trie, excluded: np.ndarray | None, allowed: np.ndarray | None
) -> LeafFilter | None:
    """Filter of one request; None where it allows everything.

    excluded: [X] item rows, duplicates allowed. allowed: [I] bool over item rows.
    Raises ValueError for a row outside the catalogue or a bitmap of another length.
    """
    if excluded is not None and excluded.size:
        low, high = int(excluded.min()), int(excluded.max())
        if low < 0 or high >= trie.num_items:
            raise ValueError(
                f"excluded rows span {low}..{high}; the catalogue has {trie.num_items}"
            )
    if allowed is not None:
        if allowed.shape != (trie.num_items,):
            raise ValueError(
                f"allowed is {allowed.shape}; the catalogue has {trie.num_items} items"
            )
        kept = torch.from_numpy(allowed).to(trie.device)[trie.leaf_items]
        if excluded is not None and excluded.size:
            kept[trie.item_leaves[torch.from_numpy(excluded).to(trie.device)].long()] = False
        zero = torch.zeros(1, dtype=torch.int64, device=trie.device)
        return LeafFilter(None, torch.cat([zero, kept.cumsum(0)]))
    if excluded is None or not excluded.size:
        return None
    rows = torch.from_numpy(excluded).to(trie.device, torch.int64)
    return LeafFilter(torch.unique(trie.item_leaves[rows]), None)
