"""Which leaves of a trie a request allows, counted at every prefix.

Leaves are numbered in trie order, so the items under a prefix are a range of leaf ranks and the
allowed ones among them are a difference of two counts. A filter is in two parts: bits of the base's
leaves, which all requests that ask the same share, in every version over that base; and lists of
the few leaves of which a version or a request says something else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.cpu.native import compiled
from recserve.kernels.trie.trie_children import LeafBits


@dataclass(frozen=True)
class LeafFilter:
    """Allowed leaves: all, or those of `bits` and `added`, without the excluded ones.

    excluded: ascending ranks int64 of leaves that are allowed otherwise, in lists that have no leaf
    in common; a row without a leaf has the number of items there. bits: one row, of the base's
    leaves. added: ascending ranks int64 of leaves that are allowed beside those. Without both, all
    leaves are allowed but the excluded ones; without bits, those added.
    """

    excluded: tuple[Tensor, ...] = ()
    bits: LeafBits | None = None
    added: Tensor | None = None

    @property
    def all(self) -> bool:
        """Whether all leaves are allowed but the excluded ones."""
        return self.bits is None and self.added is None


def native_leaf_bits(rows: np.ndarray, leaf_rows: Tensor) -> LeafBits:
    """`dispatch.leaf_bits` on a CPU in C: one pass over the leaves."""
    rows, leaf_rows = np.ascontiguousarray(rows), leaf_rows.contiguous()
    leaves = leaf_rows.shape[0]
    words = torch.empty(1, leaves // 32 + 1, dtype=torch.int32)
    counts = torch.empty_like(words)
    compiled().leaf_bits(
        rows.ctypes.data, leaf_rows.data_ptr(), leaves, words.data_ptr(), counts.data_ptr()
    )
    return LeafBits(words, counts)
