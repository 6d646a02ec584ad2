"""Bits of a trie's leaves from bits of item rows, on a CPU in C: one pass over the leaves."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.cpu.native import compiled
from recserve.kernels.trie.trie_children import LeafBits


def leaf_bits(rows: np.ndarray, leaf_rows: Tensor) -> LeafBits:
    """As `dispatch.leaf_bits`."""
    rows, leaf_rows = np.ascontiguousarray(rows), leaf_rows.contiguous()
    leaves = leaf_rows.shape[0]
    words = torch.empty(1, leaves // 32 + 1, dtype=torch.int32)
    counts = torch.empty_like(words)
    compiled().leaf_bits(
        rows.ctypes.data, leaf_rows.data_ptr(), leaves, words.data_ptr(), counts.data_ptr()
    )
    return LeafBits(words, counts)
