"""Greedy acceptance (accept.c) and masks of tokens (masks.c) in C."""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.native.native import TYPES, get_library
from recserve.kernels.tree import TokenTree


def greedy_paths(logits: Tensor, tree: TokenTree, max_depth: int) -> Tensor:
    """Runs `acceptance.greedy_paths_reference` in C, which reads the rows of the paths only."""
    logits, kinds, trees = logits.contiguous(), tree.kinds, tree.num_trees
    found = torch.empty(trees, 2 * max_depth + 5, dtype=torch.int64)
    get_library().greedy_paths(
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


def ban_masked(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """Runs `masks.ban_masked_reference` in C."""
    if bits.shape[0]:
        rows = rows.contiguous()
        get_library().ban_masked(
            logits.data_ptr(),
            bits.data_ptr(),
            rows.data_ptr(),
            logits.shape[0],
            logits.shape[1],
            bits.shape[1],
        )
