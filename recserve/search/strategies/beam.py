"""Strategy `beam`: full beam search, in which the tree grows by one level per round."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar, Self

import torch
from torch import Tensor

from recserve.core.request import SlateQuery
from recserve.core.sequence import SearchSequence
from recserve.core.strategy import Draft, Results
from recserve.models.scored_model import with_scoring
from recserve.models.scoring import Scoring
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.search.beam_search import BeamSearch
from recserve.search.dense_candidates import (
    add_candidates,
    find_candidate_keys,
    score_ready_candidates,
    unscored_candidate_keys,
)
from recserve.search.slates import slates
from recserve.search.strategies.slate_trees import trace_round, with_trees
from recserve.search.strategy import AutoRole, Heads, RecommendStrategy
from recserve.search.trie_paths import PathDraft


class BeamStrategy(RecommendStrategy):
    """Full beam search, one level per round."""

    name = "beam"
    exact = True
    dense_weight = "used"
    invariant = True
    auto: ClassVar[AutoRole | None] = "default"
    captured_search = "beam"
    missing = "this recommender predicts all levels at once; choose strategy rpg"

    def __init__(self, model: SemanticIdModel, scoring: Scoring | None = None) -> None:
        """Selects how items are scored.

        Args:
            model: The recommender.
            scoring: Its scoring. None: that of the model.
        """
        scoring = scoring or model.config.scoring
        self.model, self.scoring, self._own = with_scoring(model, scoring), scoring, model
        self.level_offsets = level_offsets_of(model)
        self.skip_single = self.model.config.normalization == "children"
        unequal = scoring.length_penalty > 0 and model.config.ended_code is not None
        self.thresholds, self.orders_by_sum = self.skip_single and not unequal, not unequal
        self._captured = self.model is model and not scoring.length_penalty

    def with_scoring(self, scoring: Scoring) -> BeamStrategy:
        """Returns beam search of the same model with another scoring."""
        return BeamStrategy(self._own, scoring)

    @classmethod
    def from_models(cls, model: SemanticIdModel, heads: Heads) -> Self | None:
        """Returns the strategy for every recommender that predicts codes one after another."""
        return cls(model) if model.config.autoregressive else None

    def tree_capacity(self, request: SlateQuery) -> int:
        """Returns the most nodes that a request can have computed: the sum of three parts.

        - Beam search computes up to W nodes at each level except the last.
        - Rounds that score all forks at once compute up to W nodes at each level below the closing
          level.
        - Dense candidates add up to W nodes at each level except the last, if the request has a
          dense weight.
        """
        width, trie = request.width, request.trie
        nodes = sum(min(width, size) for size in trie.level_sizes[1 : trie.num_levels])
        if self.skip_single:
            nodes += width * max(trie.num_levels - 1 - trie.closing_level, 0)
        return nodes + width * (trie.num_levels - 1) * bool(request.dense_weight)

    def start(self, sequences: Seq[SearchSequence]) -> BeamSearch:
        """Returns a search at level 1, in five steps whose order matters.

        1. Level 0 of each request, with its filters.
        2. The dense head's best items, which compete with the finished beams.
        3. Level 1, scored from the last hidden state of the prefix. Bounds use the scores of step 2
           only once all of them are known.
        4. The prefixes that the target must score for the items of step 2.
        5. Their scores, if the prefix alone gives them.
        """
        search = BeamSearch.start(self.model, sequences, thresholds=self.thresholds)
        add_candidates(search)
        search.advance()
        find_candidate_keys(search)
        score_ready_candidates(search)
        return search

    def can_replay(self, sequences: Seq[SearchSequence]) -> bool:
        """Returns whether the model scores as in the captured search."""
        return self._captured

    def is_finished(self, state: BeamSearch) -> bool:
        """Returns whether the beams are leaves and every competing item is scored."""
        return state.is_finished and unscored_candidate_keys(state) is None

    def propose(self, state: BeamSearch) -> Draft:
        """Returns the prefixes that fork, and in the first round those of the dense candidates."""
        return state.propose(self.level_offsets, unscored_candidate_keys(state))

    def verify(
        self, state: BeamSearch, draft: PathDraft, slots: Tensor, hidden: Tensor
    ) -> BeamSearch:
        """Moves as many levels deeper as the scored prefixes prove."""
        trace_round(state, draft)
        state.record(draft, slots, hidden)
        score_ready_candidates(state)
        state.advance()
        return state

    def finish(self, state: BeamSearch) -> Results:
        """Returns the slates."""
        divisors = self._divisors(state) if self.scoring.length_penalty else None
        return with_trees(slates(state, self.exact, divisors, self.orders_by_sum), state)

    def _divisors(self, state: BeamSearch) -> Tensor:
        """Returns [B, W] the power of the number of scored tokens of each beam."""
        config, paths = self._own.config, state.beams.paths
        levels = config.num_token_levels
        if not self.scoring.end_tokens:
            levels -= config.num_end_levels
        codes = state.trie.codes_of(paths[..., :levels].flatten())
        codes = codes.view(*paths.shape[:2], -1)
        scored = codes != (-1 if config.ended_code is None else config.ended_code)
        return scored.sum(-1).clamp(min=1).float() ** self.scoring.length_penalty


def level_offsets_of(model: SemanticIdModel) -> Tensor:
    """Returns [L] the first token of each level, on the model's device."""
    return torch.tensor(model.config.level_offsets, device=model.tokens.weight.device)
