"""Moving along scored trees: which child carries a token, which nodes lead to one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from recserve.kernels import accept_reference
from recserve.kernels.host import on_device
from recserve.kernels.tree import CANDIDATE, TokenTree
from recserve.speculation.draft import TextDraft
from recserve.speculation.verifier import Accepted, ScoredTrees


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


def path_of(chosen: Seq[int], draft: TextDraft, start: int) -> list[int]:
    """The same path where the token at every node is known on the host, as packed nodes.

    start: packed node 0 of the draft's tree. A node costs a tenth of a microsecond here, far less
    than in the forward before.
    """
    path, tokens = [start], draft.tokens.tolist() if len(draft) else []
    if draft.depth == len(draft) and draft.kinds is None:
        for node, token in enumerate(tokens, start):
            if token != chosen[node]:
                break
            path.append(node + 1)
        return path
    kinds = None if draft.kinds is None else draft.kinds.tolist()
    leads = _leads(tokens, draft.parents.tolist(), kinds)
    child = leads.get((-1, chosen[start]))
    while child is not None:
        path.append(start + 1 + child)
        child = leads.get((child, chosen[path[-1]]))
    return path


def _leads(
    tokens: Seq[int], parents: Seq[int], kinds: Seq[int] | None
) -> dict[tuple[int, int], int]:
    """From a node and a token to the first of its candidate children that carries it."""
    return {
        (parents[node], tokens[node]): node
        for node in reversed(range(len(tokens)))
        if kinds is None or kinds[node] == CANDIDATE
    }


def follow_chosen(scored: ScoredTrees, chosen: Tensor) -> Accepted:
    """The same path where the token at every node is known. chosen [T]."""
    walk = accept_reference.follow(chosen, scored.tree, scored.depth)
    return Accepted(walk.nodes, walk.lengths, walk.bonus)


def path_to(tree: TokenTree, ends: Tensor, lengths: Tensor, depth: int) -> Tensor:
    """[B, depth + 1] the nodes from node 0 to `ends` [B], of depths `lengths` [B], then -1."""
    spare = depth + 1  # column of those that are above node 0 already
    nodes = torch.full((ends.shape[0], depth + 2), -1, dtype=torch.int64, device=ends.device)
    at, column = ends, lengths
    for _ in range(depth + 1):
        nodes.scatter_(1, torch.where(at >= 0, column, spare)[:, None], at[:, None])
        at, column = torch.where(at >= 0, tree.parents[at.clamp(min=0)], -1), column - 1
    return nodes[:, :spare]
