"""All levels at once: items scored by the level heads from the root's last hidden state.

No tree and no forward after the root. An item's score is the mean over levels of its codes'
log-probabilities, which are independent of each other given the state (RPG, KDD 2025, section 3);
it is no beam search, so an answer is never `exact`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.core.drafting import Draft
from recserve.core.request import RecommendRequest, Result, Slate
from recserve.core.sequence import Sequence
from recserve.draft.item_graph import best_items
from recserve.engine.strategies.beam import request_of
from recserve.kernels.item_scores import NOTHING, rows_of, scores_of
from recserve.models.recommender import Recommender


@dataclass(frozen=True)
class Found:
    """Requests with their answers. best [B, k]: rank keys, best first, NOTHING where none is."""

    sequences: tuple[Sequence, ...]
    best: Tensor


class ParallelStrategy:
    """Level heads over the whole catalogue or along the item graph."""

    def __init__(self, model: Recommender) -> None:
        self.model = model
        self.tables = model.level_tables()
        items = model.config.input == "items"
        self.first_item = model.config.num_code_tokens if items else None

    def tree_room(self, request: RecommendRequest) -> int:
        """None: there is no tree."""
        return 0

    def start(self, sequences: Seq[Sequence]) -> Found:
        """The whole answer."""
        began = time.perf_counter()
        requests = [request_of(s) for s in sequences]
        tails = torch.stack([s.tail for s in sequences if s.tail is not None])
        log_probs = self.tables.log_probs(tails)
        item_tokens = self.model.item_tokens[: requests[0].trie.num_rows]
        best = best_items(requests, log_probs, item_tokens, self.first_item)
        for sequence in sequences:
            sequence.timing.draft_ms += (time.perf_counter() - began) * 1e3
        return Found(tuple(sequences), best)

    def finished(self, state: Found) -> bool:
        """True: nothing is left to score."""
        return True

    def propose(self, state: Found) -> Draft:
        """Never asked for, since `start` finishes."""
        raise AssertionError("parallel needs no tree")

    def verify(self, state: Found, draft: Draft, slots: Tensor, hidden: Tensor) -> Found:
        """Never asked for, since `start` finishes."""
        raise AssertionError("parallel needs no tree")

    def finish(self, state: Found) -> list[Result]:
        """Slates."""
        counts = (state.best != NOTHING).sum(1).tolist()
        rows, scores = rows_of(state.best).cpu().numpy(), scores_of(state.best).cpu().numpy()
        slates: list[Result] = []
        for b, sequence in enumerate(state.sequences):
            n = min(request_of(sequence).k, counts[b])
            slates.append(
                Slate(rows[b, :n].copy(), scores[b, :n].copy(), False, 0, sequence.timing)
            )
        return slates
