"""Greedy acceptance in C (accept.c)."""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.native.native import TYPES, compiled
from recserve.kernels.tree import TokenTree


def greedy_paths(logits: Tensor, tree: TokenTree, max_depth: int) -> Tensor:
    """Runs `acceptance.greedy_paths_reference` in C, which reads the rows of the paths only."""
    logits, kinds, trees = logits.contiguous(), tree.kinds, tree.num_trees
    found = torch.empty(trees, 2 * max_depth + 5, dtype=torch.int64)
    compiled().greedy_paths(
        TYPES[logits.dtype],
        logits.data_ptr(),
        logits.shape[1],
        tree.tokens.data_ptr(),
        tree.parents.data_ptr(),
        None if kinds is None else kinds.data_ptr(),
        tree.offsets.data_ptr(),
        trees,
        max_depth,
        found.data_ptr(),
    )
    return found
