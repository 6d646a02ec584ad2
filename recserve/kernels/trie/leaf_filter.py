"""Filters over the leaves of a trie, counted under every prefix.

Leaves are numbered in trie order. So the items under a prefix are a range of leaf ranks, and the
number of allowed ones is the difference of two counts. A filter has two parts. Bits over the base's
leaves are shared by all requests with the same filter, in every version over this base. Short lists
hold the leaves where a version or a request differs.
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
    """The leaves that a request allows.

    Without `bits` and `added`, all leaves are allowed. Otherwise the leaves of either are. The
    excluded leaves are removed in both cases.

    Attributes:
        excluded: Lists of ascending ranks int64 of leaves to remove. No leaf is in two lists. A row
            without a leaf has the number of items as its rank.
        bits: Allowed leaves of the base, one row.
        added: Ascending ranks int64 of leaves that are allowed in addition to `bits`.
    """

    excluded: tuple[Tensor, ...] = ()
    bits: LeafBits | None = None
    added: Tensor | None = None

    @property
    def all(self) -> bool:
        """Whether all leaves except the excluded ones are allowed."""
        return self.bits is None and self.added is None


def native_leaf_bits(rows: np.ndarray, leaf_rows: Tensor) -> LeafBits:
    """Runs `dispatch.leaf_bits` on a CPU in C: one pass over the leaves."""
    rows, leaf_rows = np.ascontiguousarray(rows), leaf_rows.contiguous()
    leaves = leaf_rows.shape[0]
    words = torch.empty(1, leaves // 32 + 1, dtype=torch.int32)
    counts = torch.empty_like(words)
    compiled().leaf_bits(
        rows.ctypes.data, leaf_rows.data_ptr(), leaves, words.data_ptr(), counts.data_ptr()
    )
    return LeafBits(words, counts)
