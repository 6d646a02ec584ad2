"""Moving along scored trees: which child carries a token, which nodes lead to one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recserve.core.text import Accepted, ScoredTrees
from recserve.kernels import accept_reference
from recserve.kernels.tree import CANDIDATE, TokenTree


def first_children(tree: TokenTree, nodes: Tensor, wanted: Tensor) -> Tensor:
    """[B] the first wanted candidate child of one node of each tree, -1 where there is none.

    nodes [B] packed, one of each tree. wanted [T] bool.
    """
    owners = tree.tree_ids()
    child = (tree.parents == nodes[owners]) & wanted
    if tree.kinds is not None:
        child &= tree.kinds == CANDIDATE
    index = torch.arange(tree.num_nodes, device=nodes.device)
    none = torch.full_like(nodes, tree.num_nodes)
    found = none.scatter_reduce(0, owners, torch.where(child, index, tree.num_nodes), "amin")
    return torch.where(found < tree.num_nodes, found, -1)


def follow(scored: ScoredTrees, draw: Callable[[Tensor, Tensor], Tensor]) -> Accepted:
    """Draw a token at node 0, go to the child that carries it, and so on; the first token that no
    child carries is the bonus.

    draw: packed nodes [m] and the numbers of their trees [m] -> tokens [m]. Nodes off the path are
    not asked for.
    """
    tree = scored.tree
    owners = tree.tree_ids()
    nodes = torch.full(
        (tree.num_trees, scored.depth + 1), -1, dtype=torch.int64, device=owners.device
    )
    here = tree.offsets[:-1].clone()
    bonus = torch.zeros_like(here)
    rows = torch.arange(tree.num_trees, device=owners.device)
    for depth in range(scored.depth + 1):
        nodes[rows, depth] = here[rows]
        bonus[rows] = draw(here[rows], rows)
        if depth == scored.depth:
            break
        children = first_children(tree, here, tree.tokens == bonus[owners])[rows]
        rows = rows[children >= 0]
        if not rows.shape[0]:
            break
        here[rows] = children[children >= 0]
    return Accepted(nodes, (nodes >= 0).sum(1) - 1, bonus)


def follow_chosen(scored: ScoredTrees, chosen: Tensor) -> Accepted:
    """The same path where the token at every node is known. chosen [T]."""
    walk = accept_reference.follow(chosen, scored.tree, scored.depth)
    return Accepted(walk.nodes, walk.lengths, walk.bonus)


def path_to(tree: TokenTree, ends: Tensor, lengths: Tensor, depth: int) -> Tensor:
    """[B, depth + 1] the nodes from node 0 to `ends` [B], of depths `lengths` [B], then -1."""
    nodes = torch.full((ends.shape[0], depth + 1), -1, dtype=torch.int64, device=ends.device)
    at, column = ends, lengths
    for _ in range(depth + 1):
        rows = (at >= 0).nonzero()[:, 0]
        nodes[rows, column[rows]] = at[rows]
        at, column = torch.where(at >= 0, tree.parents[at.clamp(min=0)], -1), column - 1
    return nodes
