"""Strategy `dense`: nearest neighbours of query vectors made from the root's last state.

No tree is scored.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Self

import numpy as np

from recserve.core.request import Slate
from recserve.core.sequence import Sequence, stacked_last_hidden
from recserve.core.strategy import OneRoundStrategy, Results
from recserve.models.dense_retriever import DenseRetriever
from recserve.models.recommender import Recommender
from recserve.search.dense import nearest
from recserve.search.strategies.beam import request_of
from recserve.search.strategy import Heads, RecommendStrategy


class DenseStrategy(OneRoundStrategy, RecommendStrategy):
    """Retrieval with one vector per outcome and time offset, without any tree round.

    Scores are cosines times the retriever's scale: the logits of its training softmax.
    """

    name = "dense"
    dense_weight = "ignored"
    outcome = True
    auto = "hurried"
    missing = "no retriever for this recommender; run `recserve train retriever`"

    def __init__(self, retriever: DenseRetriever) -> None:
        self.retriever = retriever
        self.scale = np.float32(retriever.scale.item())

    @classmethod
    def from_models(cls, model: Recommender, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender with a retriever."""
        if heads.retriever is None or not model.config.autoregressive:
            return None
        return cls(heads.retriever)

    def results(self, sequences: Seq[Sequence], draft: None, hidden: None) -> Results:
        """Runs the head once and one index search for all requests."""
        requests = list(map(request_of, sequences))
        found = nearest(self.retriever, stacked_last_hidden(sequences), requests)
        return [
            Slate(items.rows, items.cosines * self.scale, self.exact, 0, sequence.timing)
            for items, sequence in zip(found, sequences, strict=True)
        ]
