"""Given candidates as a tree: branches of one token for the ranker, merged semantic ids for
likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recserve.core.drafting import Draft
from recserve.core.request import RankRequest
from recserve.kernels.tree import TokenTree, from_paths
from recserve.kernels.trie import Trie
from recserve.models.inputs import NodeInputs


def propose_branches(requests: Seq[RankRequest]) -> Draft:
    """One isolated node per candidate: a candidate sees the root, up to its own exposure, and
    itself.
    """
    counts = torch.tensor([0, *(len(r.candidates) for r in requests)])
    inputs = NodeInputs.cat([r.candidates for r in requests])
    index = torch.arange(len(inputs))
    limits = None
    if any(r.root_limits is not None for r in requests):
        limits = torch.cat([_root_limits(r) for r in requests])
    tree = TokenTree(
        inputs.tokens,
        torch.full_like(index, -1),
        torch.zeros_like(index),
        index + 1,
        counts.cumsum(0),
        root_limits=limits,
    ).to(inputs.tokens.device)
    return Draft(tree, inputs)


def _root_limits(request: RankRequest) -> Tensor:
    if request.root_limits is None:
        return torch.full((len(request.candidates),), len(request.root.inputs))
    return torch.from_numpy(request.root_limits).to(torch.int64)


@dataclass(frozen=True)
class PathDraft(Draft):
    """A draft of semantic-id prefixes and where each candidate went.

    rows [P]: the drafted candidates, counted over all requests. path_nodes [P, L - 1]: tree node of
    each of their prefixes. nodes [T]: trie node of each tree node.
    """

    rows: Tensor | None = None
    path_nodes: Tensor | None = None
    nodes: Tensor | None = None


def propose_paths(
    trie: Trie,
    trie_nodes: Tensor,
    owners: Tensor,
    num_trees: int,
    level_offsets: Tensor,
    skip: bool,
) -> PathDraft | None:
    """Tree of the candidates' prefixes, shared ones merged; the last code of an item needs no node.

    trie_nodes [M, L]: trie node of every prefix of every candidate. owners [M]: its request.
    level_offsets [L]: first token of each level. skip: leave out what lies below the last fork of
    every path through it, which has log-probability 0. None when the root alone decides.
    """
    prefixes = trie_nodes[:, :-1]
    forks = trie.num_children(prefixes) > 1
    if not skip:
        forks = torch.ones_like(forks)
    needed = forks.flip(1).cummax(1).values.flip(1) if forks.shape[1] else forks
    rows = needed.any(1).nonzero().flatten()
    if not rows.shape[0]:
        return None
    built = from_paths(prefixes[rows], owners[rows], num_trees)
    nodes = built.tree.tokens
    computed = torch.zeros_like(nodes, dtype=torch.bool)
    computed[built.nodes[needed[rows]]] = True
    queries = computed.nonzero().flatten()
    tokens = level_offsets[built.tree.depths] + trie.node_codes[nodes]
    return PathDraft(
        replace(built.tree, tokens=tokens),
        NodeInputs(tokens[queries]),
        queries,
        torch.full_like(tokens, -1),
        rows,
        built.nodes,
        nodes,
    )
