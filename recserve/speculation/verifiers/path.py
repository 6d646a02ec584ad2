"""Paths in scored trees: the child that carries a token, and the nodes on the way to a node."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.tree import CANDIDATE, TokenTree
from recserve.speculation.verifier import Accepted, ScoredTrees


def first_children(tree: TokenTree, nodes: Tensor, wanted: Tensor) -> Tensor:
    """Returns the first wanted candidate child of one node per tree.

    Args:
        tree: B packed trees with T nodes.
        nodes: [B] packed nodes, one per tree.
        wanted: [T] bool.

    Returns:
        [B] packed children, -1 if there is none.
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
    """Draws a token at node 0, moves to the child that carries it, and repeats.

    The first token that no child carries is the bonus token.

    Args:
        scored: B scored trees.
        draw: Maps packed nodes [m] and their tree numbers [m] to tokens [m]. It is called for nodes
            on the path only.
    """
    tree, device = scored.tree, scored.tree.tokens.device
    kinds = None if tree.kinds is None else tree.kinds.tolist()
    leads = _leads(tree.tokens.tolist(), tree.parents.tolist(), kinds)
    paths = [[node] for node in tree.offsets[:-1].tolist()]
    bonus, rows = [0] * len(paths), list(range(len(paths)))
    while rows:
        here = [paths[row][-1] for row in rows]
        drawn = draw(on_device(here, device), on_device(rows, device)).tolist()
        going = []
        for row, node, token in zip(rows, here, drawn, strict=True):
            bonus[row], child = token, leads.get((node, token))
            if child is not None:
                paths[row].append(child)
                going.append(row)
        rows = going
    nodes = [path + [-1] * (scored.depth + 1 - len(path)) for path in paths]
    lengths = [len(path) - 1 for path in paths]
    placed = on_device(np.array(nodes), device)
    return Accepted(placed, on_device(lengths, device), on_device(bonus, device))


def _leads(
    tokens: Seq[int], parents: Seq[int], kinds: Seq[int] | None
) -> dict[tuple[int, int], int]:
    """Maps a node and a token to the first candidate child of the node that carries the token."""
    return {
        (parents[node], tokens[node]): node
        for node in reversed(range(len(tokens)))
        if kinds is None or kinds[node] == CANDIDATE
    }


def path_to(tree: TokenTree, ends: Tensor, lengths: Tensor, depth: int) -> Tensor:
    """Returns the nodes from node 0 of each tree to a given node.

    Args:
        tree: B packed trees.
        ends: [B] packed last nodes.
        lengths: [B] depths of `ends`.
        depth: Most levels below node 0.

    Returns:
        [B, depth + 1] packed nodes, node 0 first, -1 after the end.
    """
    spare = depth + 1  # an extra column for walks that already passed node 0; dropped at the end
    nodes = torch.full((ends.shape[0], depth + 2), -1, dtype=torch.int64, device=ends.device)
    at, column = ends, lengths
    for _ in range(depth + 1):
        nodes.scatter_(1, torch.where(at >= 0, column, spare)[:, None], at[:, None])
        at, column = torch.where(at >= 0, tree.parents[at.clamp(min=0)], -1), column - 1
    return nodes[:, :spare]
