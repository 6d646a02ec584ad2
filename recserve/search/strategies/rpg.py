"""Strategy `rpg`: items scored by independent level heads from the root's last hidden state.

It uses no tree and no forward after the root. Given the state, the codes of an item are independent
of each other. An item's score is the mean over levels of their log-probabilities. The result
differs from beam search, so it is never `exact`.

Source: RPG, KDD 2025, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Self

from recserve.core.request import SlateQuery
from recserve.core.sequence import Sequence, stacked_last_hidden
from recserve.core.strategy import OneRoundStrategy, Results
from recserve.kernels.item_graph import NOTHING, rows_of, scores_of
from recserve.models.recommender import Recommender
from recserve.search.item_graph import best_items
from recserve.search.slates import slate_under_caps
from recserve.search.strategies.beam import request_of
from recserve.search.strategy import Heads, RecommendStrategy


class RpgStrategy(OneRoundStrategy, RecommendStrategy):
    """Scores by level heads, over the whole catalogue or along the item graph."""

    name = "rpg"
    auto = "fallback"
    missing = "this recommender has no level heads; train it with a recipe that has them"

    def __init__(self, model: Recommender) -> None:
        self.model = model
        self.tables = model.level_tables()
        items = model.config.input == "items"
        self.first_item = model.config.num_code_tokens if items else None

    @classmethod
    def from_models(cls, model: Recommender, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender with level heads."""
        return cls(model) if model.config.level_heads else None

    def results(self, sequences: Seq[Sequence], draft: None, hidden: None) -> Results:
        """Finds the items of all requests together."""
        requests = [request_of(s) for s in sequences]
        log_probs = self.tables.log_probs(stacked_last_hidden(sequences))
        item_tokens = self.model.item_tokens[: requests[0].trie.num_rows]
        widened = [replace(request, k=_wanted(request)) for request in requests]
        # Rank keys [B, n], best first. Each request uses the first `_wanted` ones.
        best = best_items(widened, log_probs, item_tokens, self.first_item).cpu()
        counts = (best != NOTHING).sum(1).tolist()
        rows, scores = rows_of(best).numpy(), scores_of(best).numpy()
        answers = []
        for b, (sequence, request) in enumerate(zip(sequences, widened, strict=True)):
            n = min(request.k, counts[b])
            found, complete = (rows[b, :n], scores[b, :n]), n < request.k
            answers.append(slate_under_caps(sequence, *found, complete, exact=self.exact))
        return answers


def _wanted(request: SlateQuery) -> int:
    """Returns the number of items to find: k, or the beam width if caps may drop some."""
    return request.width if request.caps else request.k
