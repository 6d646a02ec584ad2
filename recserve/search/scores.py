"""Scores of given candidates: nothing is refused, every node's result is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.trie.trie_view import TrieView, padding_of
from recserve.models.language_model import LanguageModel
from recserve.models.recommender import Recommender
from recserve.search.scored import Scored
from recserve.search.verify import level_log_probs

# Rows whose logits over a whole vocabulary exist at once.
LABEL_ROWS = 128


def label_scores(model: LanguageModel, hidden: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label as the next token.

    hidden [M, E], labels [K] -> [M, K] float32.
    """
    parts = [
        model.logits(rows).float().log_softmax(-1)[:, labels]
        for rows in torch.split(hidden, LABEL_ROWS)
    ]
    return torch.cat(parts)


def root_scores(
    trie: TrieView, trie_nodes: Tensor, owners: Tensor, tails: Tensor, model: Recommender
) -> Tensor:
    """Log-probability of each candidate's first code.

    trie_nodes [M, L], owners [M] the request of each, tails [B, E] hidden state of the last root
    token. Returns [M].
    """
    top = torch.zeros(1, dtype=torch.int64, device=trie.device)
    children = trie.children(top, padding_of(trie, 0))
    codes = children.codes.long().expand(tails.shape[0], -1)
    log_probs = level_log_probs(model, tails, 0, codes, children.valid.expand_as(codes))
    return log_probs[owners, trie.places(trie_nodes[:, 0], top)]


def path_scores(
    trie: TrieView, trie_nodes: Tensor, owners: Tensor, scored: Scored, model: Recommender
) -> Tensor:
    """Log-probability of each candidate's codes after the first.

    trie_nodes [M, L], owners [M]. Prefixes that were not scored have one child and add 0. Returns
    [M].
    """
    size = trie.num_nodes
    out = torch.zeros(trie_nodes.shape[0], device=trie.device)
    levels = trie.levels(scored.keys % size)
    for level in range(1, trie.num_levels):
        here = (levels == level).nonzero().flatten()
        if not here.shape[0]:
            continue
        part = Scored(scored.keys[here], scored.slots[here], scored.hidden[here])
        children = trie.children(part.keys % size, padding_of(trie, level))
        log_probs = level_log_probs(
            model, part.hidden, level, children.codes.long(), children.valid
        )
        parents, nodes = trie_nodes[:, level - 1], trie_nodes[:, level]
        row = part.find(owners * size + parents)
        gain = log_probs[row.clamp(min=0), trie.places(nodes, parents)]
        out += torch.where(row >= 0, gain, 0.0)
    return out
