"""Strategy `dense`: nearest neighbours of query vectors made from the root's last state.

No tree is scored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

import numpy as np

from recserve.core.request import Result, Slate
from recserve.core.sequence import Sequence, stacked_last_hidden
from recserve.models.dense_retriever import DenseRetriever
from recserve.models.recommender import Recommender
from recserve.search.dense import Retrieved, nearest
from recserve.search.recommend_strategy import Heads, RecommendStrategy
from recserve.search.strategies.beam import request_of


@dataclass(frozen=True)
class Retrievals:
    """Requests and the items retrieved for them.

    Attributes:
        sequences: The requests.
        found: The items of each request.
    """

    sequences: tuple[Sequence, ...]
    found: list[Retrieved]


class DenseStrategy(RecommendStrategy):
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

    def start(self, sequences: Seq[Sequence]) -> Retrievals:
        """Runs the head once and one index search for all requests."""
        began = time.perf_counter()
        last_hidden = stacked_last_hidden(sequences)
        found = nearest(self.retriever, last_hidden, [request_of(s) for s in sequences])
        for sequence in sequences:
            sequence.timing.draft_ms += (time.perf_counter() - began) * 1e3
        return Retrievals(tuple(sequences), found)

    def finish(self, state: Retrievals) -> list[Result]:
        """Returns the slates. They are not those of beam search."""
        return [
            Slate(found.rows, found.cosines * self.scale, self.exact, 0, sequence.timing)
            for found, sequence in zip(state.found, state.sequences, strict=True)
        ]
