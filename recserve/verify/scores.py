"""Scores of given candidates: nothing is refused, every node's result is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.draft.candidates import PathDraft
from recserve.kernels.trie import Trie
from recserve.models.recommender import Recommender
from recserve.verify.beam import level_log_probs


def root_scores(
    trie: Trie, trie_nodes: Tensor, owners: Tensor, tails: Tensor, model: Recommender
) -> Tensor:
    """Log-probability of each candidate's first code.

    trie_nodes [M, L], owners [M] the request of each, tails [B, E] hidden state of the last root
    token. Returns [M].
    """
    top = torch.zeros(1, dtype=torch.int64, device=trie.device)
    children = trie.children(top)
    codes = children.codes.long().expand(tails.shape[0], -1)
    log_probs = level_log_probs(model, tails, 0, codes, children.valid.expand_as(codes))
    return log_probs[owners, trie_nodes[:, 0] - trie.first_child[0]]


def path_scores(
    trie: Trie, trie_nodes: Tensor, draft: PathDraft, hidden: Tensor, model: Recommender
) -> Tensor:
    """Log-probability of each candidate's codes after the first.

    trie_nodes [M, L]; hidden [Tq, E] of the draft's computed nodes. Returns [M]; prefixes that were
    left out have one child and add 0.
    """
    assert draft.rows is not None and draft.path_nodes is not None
    assert draft.nodes is not None and draft.queries is not None
    out = hidden.new_zeros(trie_nodes.shape[0], dtype=torch.float32)
    row_of_node = torch.full_like(draft.nodes, -1)
    for depth in range(draft.path_nodes.shape[1]):
        at_depth = draft.tree.depths[draft.queries] == depth
        computed = draft.queries[at_depth]
        if not computed.shape[0]:
            continue
        children = trie.children(draft.nodes[computed])
        log_probs = level_log_probs(
            model, hidden[at_depth], depth + 1, children.codes.long(), children.valid
        )
        row_of_node[computed] = torch.arange(computed.shape[0], device=hidden.device)
        row = row_of_node[draft.path_nodes[:, depth]]
        here = (row >= 0).nonzero().flatten()
        candidates = draft.rows[here]
        parent, child = trie_nodes[candidates, depth], trie_nodes[candidates, depth + 1]
        out[candidates] += log_probs[row[here], child - trie.first_child[parent]]
    return out
