"""Strategy `nezha`: one forward of the target, then beam search in the self-draft head alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Self

import torch

from recserve.core.request import SlateQuery
from recserve.core.sequence import SearchSequence
from recserve.core.strategy import OneRound, OneRoundStrategy, Results
from recserve.models.inputs import NodeInputs
from recserve.models.item_heads import SelfDraftHead
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.search.beam_search import BeamSearch, HeadScores, descend
from recserve.search.dense_candidates import add_candidates, score_candidates
from recserve.search.slates import slates
from recserve.search.strategy import Heads, RecommendStrategy


class NezhaStrategy(OneRoundStrategy, RecommendStrategy):
    """NEZHA: placeholder tokens after the prefix, and beam search in the self-draft head.

    The trie and the filters restrict every level. The head alone scores the items, so `exact` is
    False. With a dense weight, the dense head's log-probability is added and its best items
    compete, as in `beam`.
    """

    name = "nezha"
    dense_weight = "used"
    auto = "hurried"
    captured_search = "nezha"
    missing = "no self-draft head was trained; run `recserve train drafter --name nezha`"

    def __init__(self, model: SemanticIdModel, head: SelfDraftHead) -> None:
        self.model, self.head = model, head
        if head.placeholders is not None:
            count, device = len(head.config.codebook_sizes), model.tokens.weight.device
            self.placeholders = NodeInputs(-1 - torch.arange(count, device=device))
            model.bind_placeholders(head.placeholders)

    @classmethod
    def from_models(cls, model: SemanticIdModel, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender with a self-draft head."""
        if heads.nezha is None or not model.config.autoregressive:
            return None
        return cls(model, heads.nezha)

    def tree_capacity(self, request: SlateQuery) -> int:
        """Returns the number of placeholders, which take tree slots."""
        return 0 if self.placeholders is None else len(self.placeholders)

    def results(self, sequences: Seq[SearchSequence], draft: None, hidden: None) -> Results:
        """Runs the whole search, which reads only the states of the prefix's forward."""
        search = BeamSearch.start(self.model, sequences, thresholds=True)
        add_candidates(search)
        search.beams = descend(search, self._scores(search)).last
        for sequence in sequences:
            sequence.rounds += 1
        if search.dense_candidates is not None and search.dense_candidates.log_probs is None:
            score_candidates(search, self._scores(search))
        return slates(search, exact=self.exact)

    def after_replay(self, sequences: Seq[SearchSequence], search: BeamSearch) -> OneRound:
        """Makes the slates."""
        return OneRound(sequences, None, slates(search, exact=self.exact))

    def _scores(self, search: BeamSearch) -> HeadScores:
        states = [
            s.placeholder_states for s in search.sequences if s.placeholder_states is not None
        ]
        reads = None if self.placeholders is None else torch.stack(states)
        contexts = self.head.contexts(search.last_hidden, reads)
        return HeadScores(search.trie, self.head, search.last_hidden, contexts)
