"""Which leaves of a trie a request allows, counted at every prefix.

Leaves are numbered in trie order, so the items under a prefix are a range of leaf ranks and the
allowed ones among them are a difference of two counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.trie import Leaves


@dataclass(frozen=True)
class LeafFilter:
    """Allowed leaves, in the cheaper of two forms.

    excluded: ascending ranks int64 of the leaves that are not allowed, in lists that have no leaf
    in common; a row without a leaf has the number of items there. before [I + 1] int64: allowed
    leaves before each rank; used instead of `excluded` when the request allows by bitmap.
    """

    excluded: tuple[Tensor, ...]
    before: Tensor | None = None

    def remaining(self, leaves: Leaves) -> Tensor:
        """Allowed leaves in each range, any shape."""
        if self.before is not None:
            return self.before[leaves.last] - self.before[leaves.first]
        left = leaves.last - leaves.first
        for ranks in self.excluded:
            gone = torch.searchsorted(ranks, leaves.last) - torch.searchsorted(ranks, leaves.first)
            left = left - gone
        return left
