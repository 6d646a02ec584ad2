"""Items by prefix of their semantic id: the trie node at one level is an item's group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from recserve.kernels.host import on_device
from recserve.kernels.trie.trie_view import TrieView


@dataclass(frozen=True)
class PrefixGroups:
    """Groups as in core/diversity.py; items are alike whose codes are the same up to `level`."""

    trie: TrieView
    level: int

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One group each."""
        asked = on_device(rows, self.trie.device, torch.int64)
        nodes = self.trie.nodes_of_items(asked)[:, self.level]
        return np.arange(rows.size), nodes.cpu().numpy().astype(np.int64)

    def items(self, groups: np.ndarray) -> np.ndarray:
        """Those of the leaves below each node."""
        below = self.trie.leaves(on_device(groups, self.trie.device, torch.int64))
        edges = zip(below.first.tolist(), below.last.tolist(), strict=True)
        rows = self.trie.leaf_rows
        found = [rows[first:last] for first, last in edges]
        return torch.cat([rows[:0], *found]).cpu().numpy()
