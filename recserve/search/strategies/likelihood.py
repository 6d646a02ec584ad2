"""Log-probability of given items.

Autoregressive models score a tree of the items' prefixes. Models with level heads alone score the
items without a tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recserve.core.request import LikelihoodQuery, Result, Scores
from recserve.core.sequence import Sequence, stacked_last_hidden
from recserve.core.strategy import Draft, Strategy, TreeStrategy
from recserve.kernels.host import on_device
from recserve.kernels.item_graph import score_rows
from recserve.kernels.trie.trie import Trie
from recserve.models.recommender import Recommender
from recserve.search.strategies.beam import level_offsets_of
from recserve.search.trie_prefixes import (
    PrefixDraft,
    ScoredTriePrefixes,
    draft_of_keys,
    needed_prefixes,
    path_scores,
    root_scores,
)


@dataclass(frozen=True)
class Likelihoods:
    """Requests whose items are being scored, M items in total.

    Attributes:
        sequences: The requests.
        trie_nodes: [M, L] trie node of every prefix of every item.
        scores: [M] log-probabilities so far.
        owners: [M] request of each item.
        draft: Prefixes to score next. None: no prefix is left.
    """

    sequences: tuple[Sequence, ...]
    trie_nodes: Tensor
    scores: Tensor
    owners: Tensor
    draft: PrefixDraft | None


class LikelihoodStrategy(TreeStrategy):
    """Log-probability of given items, from one tree of their merged prefixes in one round."""

    def __init__(self, model: Recommender) -> None:
        self.model = model
        self.level_offsets = level_offsets_of(model)
        self.skip_single = model.config.normalization == "children"

    def tree_capacity(self, request: LikelihoodQuery) -> int:
        """Returns one node per prefix of each item, and at most the nodes of the trie."""
        sizes = request.trie.level_sizes[1:-1]
        return sum(min(size, len(request.rows)) for size in sizes)

    def start(self, sequences: Seq[Sequence]) -> Likelihoods:
        """Scores the first code of each item from the root."""
        requests = [likelihood_request(s) for s in sequences]
        trie = requests[0].trie
        rows = np.concatenate([r.rows for r in requests])
        nodes = trie.nodes_of_items(on_device(rows, trie.device, torch.int64))
        counts = [len(r.rows) for r in requests]
        owners = on_device(np.repeat(np.arange(len(requests)), counts), trie.device)
        last_hidden = stacked_last_hidden(sequences)
        scores = root_scores(trie, nodes, owners, last_hidden, self.model)
        draft = propose_paths(
            trie, nodes, owners, len(sequences), self.level_offsets, self.skip_single
        )
        return Likelihoods(tuple(sequences), nodes, scores, owners, draft)

    def finished(self, state: Likelihoods) -> bool:
        """Returns whether no prefix is left to score."""
        return state.draft is None

    def propose(self, state: Likelihoods) -> Draft:
        """Returns all prefixes at once."""
        assert state.draft is not None
        return state.draft

    def verify(
        self, state: Likelihoods, draft: PrefixDraft, slots: Tensor, hidden: Tensor
    ) -> Likelihoods:
        """Adds the log-probabilities of all codes after the first."""
        trie = likelihood_request(state.sequences[0]).trie
        scored = ScoredTriePrefixes.empty(hidden).add(*draft.computed(slots), hidden)
        deeper = path_scores(trie, state.trie_nodes, state.owners, scored, self.model)
        return replace(state, scores=state.scores + deeper, draft=None)

    def finish(self, state: Likelihoods) -> list[Result]:
        """Returns scores with the one task `likelihood`."""
        return likelihood_results(state.sequences, state.scores)


def likelihood_request(sequence: Sequence) -> LikelihoodQuery:
    """Returns the query of a likelihood sequence."""
    assert isinstance(sequence.request, LikelihoodQuery)
    return sequence.request


def likelihood_results(sequences: Seq[Sequence], scores: Tensor) -> list[Result]:
    """Returns the result of each request from scores [M], ordered by request."""
    sizes = [len(likelihood_request(s).rows) for s in sequences]
    parts = torch.split(scores.float().cpu()[:, None], sizes)
    return [
        Scores(part.numpy(), ("likelihood",), s.timing)
        for part, s in zip(parts, sequences, strict=True)
    ]


def propose_paths(
    trie: Trie,
    trie_nodes: Tensor,
    owners: Tensor,
    num_trees: int,
    level_offsets: Tensor,
    skip: bool,
) -> PrefixDraft | None:
    """Returns trees of the items' prefixes, with shared prefixes merged.

    The last code of an item needs no node.

    Args:
        trie: Trie of the items.
        trie_nodes: [M, L] trie node of every prefix of every item.
        owners: [M] request of each item.
        num_trees: B.
        level_offsets: [L] first token of each level.
        skip: Whether to leave out prefixes below the last fork of a path. They add log-probability
            0.

    Returns:
        The draft. None if the root alone decides all scores.
    """
    keys = needed_prefixes(trie, trie_nodes, owners, skip)
    if not keys.shape[0]:
        return None
    return draft_of_keys(trie, keys, num_trees, level_offsets)


@dataclass(frozen=True)
class LevelLikelihoods:
    """Requests whose items are scored.

    Attributes:
        sequences: The requests.
        scores: [M] scores, ordered by request.
    """

    sequences: tuple[Sequence, ...]
    scores: Tensor


class LevelLikelihoodStrategy(Strategy):
    """Score of given items under level heads: the mean over levels, as in `rpg`, without a tree."""

    def __init__(self, model: Recommender) -> None:
        self.model = model
        self.tables = model.level_tables()

    def start(self, sequences: Seq[Sequence]) -> LevelLikelihoods:
        """Scores all items from the roots' last states."""
        last_hidden = stacked_last_hidden(sequences)
        requests = [likelihood_request(s) for s in sequences]
        rows = np.concatenate([r.rows for r in requests])
        owners = np.repeat(np.arange(len(requests)), [len(r.rows) for r in requests])
        log_probs, item_tokens = self.tables.log_probs(last_hidden), self.model.item_tokens
        scores = score_rows(
            log_probs,
            item_tokens,
            on_device(owners, last_hidden.device),
            on_device(rows, last_hidden.device, torch.int64),
        )
        return LevelLikelihoods(tuple(sequences), scores)

    def finish(self, state: LevelLikelihoods) -> list[Result]:
        """Returns scores with the one task `likelihood`."""
        return likelihood_results(state.sequences, state.scores)


def likelihood_strategy(model: Recommender) -> Strategy:
    """Returns the strategy that scores given items: code after code, or all levels at once."""
    if model.config.autoregressive:
        return LikelihoodStrategy(model)
    return LevelLikelihoodStrategy(model)
