"""Token trees from sets of trie nodes: one tree per request, whose tokens are trie nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.tree import TokenTree
from recserve.kernels.trie.trie_view import TrieView


@dataclass(frozen=True)
class TrieTree:
    """A token tree made of trie nodes.

    Attributes:
        tree: The tree. Its tokens are trie nodes.
        keys: [T] `tree number * nodes of the trie + trie node`, ascending.
        index: [T] tree node of each key.
    """

    tree: TokenTree
    keys: Tensor
    index: Tensor


def tree_of_nodes(trie: TrieView, keys: Tensor, num_trees: int) -> TrieTree:
    """Returns one token tree per request from sets of trie nodes.

    A node's items are a range of leaf ranks. So (first leaf, level) orders nodes in preorder. A
    subtree ends where the first leaf passes the node's last leaf.

    Args:
        trie: The catalogue's trie.
        keys: [n] `tree number * nodes of the trie + trie node`, duplicates allowed. All nodes above
            a node (except node 0) must be included.
        num_trees: B.
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
