"""Sets of trie nodes as token trees: one tree per request, its tokens are trie nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.tree import TokenTree
from recserve.kernels.trie.trie_view import TrieView


@dataclass(frozen=True)
class TrieTree:
    """A token tree made of trie nodes.

    keys [T]: `tree number * nodes of the trie + trie node`, ascending. index [T]: the tree node of
    each key. The tree's tokens are trie nodes.
    """

    tree: TokenTree
    keys: Tensor
    index: Tensor


def tree_of_nodes(trie: TrieView, keys: Tensor, num_trees: int) -> TrieTree:
    """One token tree per request out of sets of trie nodes.

    keys: [n] `tree number * nodes of the trie + trie node`, duplicates allowed; with a node all
    nodes above it (but node 0) must be there. A node's items are a range of leaf ranks, so ordering
    by (first leaf, level) is preorder, and a subtree ends where the first leaf passes the node's
    last.
    """
    keys = torch.unique(keys)
    size = trie.num_nodes
    owners, nodes = keys // size, keys % size
    depths = trie.levels(nodes) - 1
    spread = trie.num_items + 1
    leaves = trie.leaves(nodes)
    first = owners * spread + leaves.first
    order = torch.sort(first * trie.num_levels + depths).indices
    ranked = nodes[order]
    ends = torch.searchsorted(first[order], owners[order] * spread + leaves.last[order])
    index = torch.empty_like(order)
    index[order] = torch.arange(order.shape[0], device=order.device)
    above = torch.searchsorted(keys, owners[order] * size + trie.parents_of(ranked))
    parents = torch.where(depths[order] > 0, index[above.clamp(max=max(keys.shape[0] - 1, 0))], -1)
    offsets = torch.searchsorted(owners[order], torch.arange(num_trees + 1, device=keys.device))
    return TrieTree(TokenTree(ranked, parents, depths[order], ends, offsets), keys, index)
