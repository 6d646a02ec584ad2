"""Log-probability of given items.

Autoregressive models score a tree of the items' paths. Models with level heads alone score the
items without a tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recserve.core.request import LikelihoodQuery, Scores
from recserve.core.sequence import SearchSequence, request_of, stacked_last_hidden
from recserve.core.strategy import OneRoundStrategy, Results
from recserve.kernels.host import on_device
from recserve.kernels.item_graph import score_rows
from recserve.models.scored_model import with_scoring
from recserve.models.semantic_id_model import SemanticIdModel, item_tables
from recserve.search.strategies.beam import level_offsets_of
from recserve.search.trie_paths import (
    PathDraft,
    draft_of_keys,
    first_scores,
    needed_paths,
    path_scores,
)


@dataclass(frozen=True, kw_only=True)
class ItemDraft(PathDraft):
    """The paths of M items.

    Attributes:
        owners: [M] request of each item.
        nodes: [M, L] trie nodes on the path of every item.
    """

    owners: Tensor
    nodes: Tensor


class LikelihoodStrategy(OneRoundStrategy):
    """Log-probability of given items, from one tree of their merged paths in one round."""

    def __init__(self, model: SemanticIdModel) -> None:
        self.model = with_scoring(model, model.config.scoring)
        self.level_offsets = level_offsets_of(model)
        self.skip_single = model.config.normalization == "children"

    def tree_capacity(self, request: LikelihoodQuery) -> int:
        """Returns one node per code of each item, and at most the nodes of the trie."""
        sizes = request.trie.level_sizes[1:-1]
        return sum(min(size, len(request.rows)) for size in sizes)

    def tree(self, sequences: Seq[SearchSequence]) -> ItemDraft:
        """Returns the items' paths. The last code of an item needs no node.

        The trees are empty if the prefixes alone decide all scores.
        """
        owners, rows = _items(sequences)
        trie = request_of(sequences[0], LikelihoodQuery).trie
        nodes = trie.nodes_of_items(rows)
        keys = needed_paths(trie, nodes, owners, self.skip_single)
        draft = draft_of_keys(trie, keys, len(sequences), self.level_offsets)
        return ItemDraft(**vars(draft), owners=owners, nodes=nodes)

    def results(
        self, sequences: Seq[SearchSequence], draft: ItemDraft, hidden: Tensor | None
    ) -> Results:
        """Returns scores with the one task `likelihood`."""
        trie, last_hidden = (
            request_of(sequences[0], LikelihoodQuery).trie,
            stacked_last_hidden(sequences),
        )
        scores = first_scores(trie, draft.nodes, draft.owners, last_hidden, self.model)
        if hidden is not None:
            assert draft.query_keys is not None
            keys, order = draft.query_keys.sort()
            states = hidden[order]
            scores += path_scores(trie, draft.nodes, draft.owners, keys, states, self.model)
        return _likelihoods(sequences, scores)


class LevelLikelihoodStrategy(OneRoundStrategy):
    """Score of given items under level heads: the mean over levels, as in `rpg`, without a tree."""

    def __init__(self, model: SemanticIdModel) -> None:
        self.items = item_tables(model)
        self.tables = self.items.level_tables()

    def results(self, sequences: Seq[SearchSequence], draft: None, hidden: None) -> Results:
        """Returns scores with the one task `likelihood`."""
        log_probs = self.tables.log_probs(stacked_last_hidden(sequences))
        scores = score_rows(log_probs, self.items.item_tokens, *_items(sequences))
        return _likelihoods(sequences, scores)


def likelihood_strategy(model: SemanticIdModel) -> OneRoundStrategy:
    """Returns the strategy that scores given items: code after code, or all levels at once."""
    if model.config.autoregressive:
        return LikelihoodStrategy(model)
    return LevelLikelihoodStrategy(model)


def _items(sequences: Seq[SearchSequence]) -> tuple[Tensor, Tensor]:
    """Returns request number [M] and item row [M] of all items, ordered by request."""
    rows = [request_of(s, LikelihoodQuery).rows for s in sequences]
    owners = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
    device = request_of(sequences[0], LikelihoodQuery).trie.device
    return on_device(owners, device), on_device(np.concatenate(rows), device, torch.int64)


def _likelihoods(sequences: Seq[SearchSequence], scores: Tensor) -> Results:
    """Returns the result of each request from scores [M], ordered by request."""
    sizes = [len(request_of(s, LikelihoodQuery).rows) for s in sequences]
    parts = torch.split(scores.float().cpu()[:, None], sizes)
    return [
        Scores(part.numpy(), ("likelihood",), s.timing)
        for part, s in zip(parts, sequences, strict=True)
    ]
