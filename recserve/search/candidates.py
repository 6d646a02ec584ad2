"""Given candidates as a tree: branches of one token for the ranker, merged semantic ids for
likelihood, branches of several tokens for texts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from recserve.core.request import RankQuery, TextScoreQuery
from recserve.core.strategy import Draft
from recserve.kernels.tree import TokenTree, merge, root_branch
from recserve.kernels.trie.trie_view import TrieView
from recserve.models.inputs import NodeInputs
from recserve.search.prefixes import PrefixDraft, draft_of_keys


def propose_branches(requests: Seq[RankQuery]) -> Draft:
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


def _root_limits(request: RankQuery) -> Tensor:
    if request.root_limits is None:
        return torch.full((len(request.candidates),), len(request.root.inputs))
    return torch.from_numpy(request.root_limits).to(torch.int64)


def propose_texts(requests: Seq[TextScoreQuery], device: torch.device) -> Draft:
    """One isolated branch per text: it sees the root and itself."""
    trees = [root_branch(torch.from_numpy(r.tokens), torch.from_numpy(r.offsets)) for r in requests]
    tree = merge(trees).to(device)
    return Draft(tree, NodeInputs(tree.tokens))


def propose_paths(
    trie: TrieView,
    trie_nodes: Tensor,
    owners: Tensor,
    num_trees: int,
    level_offsets: Tensor,
    skip: bool,
) -> PrefixDraft | None:
    """Trees of the candidates' prefixes, shared ones merged; the last code of an item needs no
    node.

    trie_nodes [M, L]: trie node of every prefix of every candidate. owners [M]: its request.
    level_offsets [L]: first token of each level. skip: leave out what lies below the last fork of a
    path, which has log-probability 0. None when the root alone decides.
    """
    keys = needed_prefixes(trie, trie_nodes, owners, skip)
    if not keys.shape[0]:
        return None
    return draft_of_keys(trie, keys, num_trees, level_offsets)


def needed_prefixes(trie: TrieView, trie_nodes: Tensor, owners: Tensor, skip: bool) -> Tensor:
    """Keys (as in Scored) of the prefixes that decide the items' log-probabilities, the root aside.

    trie_nodes [M, L], owners [M], skip: as in `propose_paths`. Returns [n].
    """
    prefixes = trie_nodes[:, :-1]
    if skip:
        forks = trie.num_children(prefixes) > 1
        needed = forks.int().flip(1).cumsum(1).flip(1) > 0
    else:
        needed = torch.ones_like(prefixes, dtype=torch.bool)
    keys: Tensor = (owners[:, None] * trie.num_nodes + prefixes)[needed]
    return keys
