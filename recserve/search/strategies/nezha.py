"""Strategy `nezha`: one forward of the target, then beam search in the self-draft head alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Self

import torch
from torch import Tensor

from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Result, SlateQuery
from recserve.core.sequence import Sequence
from recserve.models.inputs import NodeInputs
from recserve.models.item_heads import SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.search import rerank
from recserve.search import verify as beam_verify
from recserve.search.beams import Beams, DenseCandidates
from recserve.search.descent import native_search_of
from recserve.search.head_search import item_log_probs, search
from recserve.search.recommend_strategy import Heads, RecommendStrategy


class NezhaStrategy(RecommendStrategy):
    """NEZHA: placeholder tokens after the root, and beam search in the self-draft head.

    The trie and the filters restrict every level. The head alone scores the items, so `exact` is
    False. With a dense weight, the dense head's log-probability is added and its best items
    compete, as in `beam`.
    """

    name = "nezha"
    dense_weight = "used"
    auto = "hurried"
    replays = "nezha"
    missing = "no self-draft head was trained; run `recserve train drafter --name nezha`"

    def __init__(self, model: Recommender, head: SelfDraftHead) -> None:
        self.model, self.head = model, head
        if head.placeholders is not None:
            count, device = len(head.config.codebook_sizes), model.tokens.weight.device
            self.placeholders = NodeInputs(-1 - torch.arange(count, device=device))
            model.bind_placeholders(head.placeholders)

    @classmethod
    def from_models(cls, model: Recommender, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender with a self-draft head."""
        if heads.nezha is None or not model.config.autoregressive:
            return None
        return cls(model, heads.nezha)

    def tree_capacity(self, request: SlateQuery) -> int:
        """Returns the number of placeholders, which take tree slots."""
        return 0 if self.placeholders is None else len(self.placeholders)

    def start(self, sequences: Seq[Sequence]) -> Beams:
        """Runs the whole search, which reads only the states of the root's forward."""
        if self.recorded is not None and (found := self.recorded(sequences)) is not None:
            return found
        beams = beam_verify.begin(tuple(sequences), by_children=True)
        beams = rerank.with_dense_candidates(beams, self.model)
        found = search(beams, self.head, self._contexts(beams), beams.widths)
        for sequence in sequences:
            sequence.rounds += 1
        return found

    def finish(self, state: Beams) -> Seq[Result | Continuation | NotFinite]:
        """Returns the slates, scored by the head."""
        if state.dense_candidates is not None and state.dense_candidates.log_probs is None:
            state = rerank.with_log_probs(
                state, self._dense_candidate_scores(state, state.dense_candidates)
            )
        return rerank.slates(state, exact=self.exact)

    def _dense_candidate_scores(self, state: Beams, dense_candidates: DenseCandidates) -> Tensor:
        """Returns [n] log-probabilities of the valid dense candidates."""
        contexts = self._contexts(state)
        if (native := native_search_of(state, self.head.search)) is not None:
            return rerank.searched_scores(state, native, contexts)
        owners, rows = dense_candidates.flat()
        return item_log_probs(self.head, state.trie, owners, rows, state.last_hidden, contexts)

    def _contexts(self, beams: Beams) -> Tensor:
        """Returns [B, L, E] what the head reads at each level in addition to its state."""
        if self.placeholders is None:
            return beams.last_hidden[:, None].expand(-1, beams.trie.num_levels, -1)
        return torch.stack(
            [s.placeholder_states for s in beams.sequences if s.placeholder_states is not None]
        )
