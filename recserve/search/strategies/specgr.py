"""Strategy `specgr`: a retriever drafts items, the target accepts the likely ones.

Beam search fills the remaining places.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from recserve.core.request import SlateQuery
from recserve.core.sequence import Sequence
from recserve.core.strategy import Draft, Results
from recserve.models.dense_retriever import DenseRetriever
from recserve.models.recommender import Recommender
from recserve.search import specgr
from recserve.search.beam_search import BeamSearch
from recserve.search.specgr import NO_VERIFIED_ITEMS, DraftedItems, VerifiedItems
from recserve.search.strategies.beam import level_offsets_of
from recserve.search.strategies.slate_trees import trace_round, with_trees
from recserve.search.strategy import Heads, RecommendStrategy
from recserve.search.trie_prefixes import PrefixDraft


@dataclass
class SpecGRState:
    """Requests whose drafted items are being verified.

    Attributes:
        search: Beam search so far.
        pending: Drafted items that are not verified yet. None: there are none.
        verified: Items verified so far.
        guided: Level of the beams at the newest guided draft. 0: there was none.
        unfilled: Numbers of the requests with fewer than k accepted items.
    """

    search: BeamSearch
    pending: DraftedItems | None
    unfilled: list[int]
    verified: VerifiedItems = NO_VERIFIED_ITEMS
    guided: int = 0

    @property
    def ended(self) -> bool:
        """True when beam search, and drafting with it, is over."""
        return not self.unfilled or self.search.finished


class SpecGRStrategy(RecommendStrategy):
    """SpecGR: lets items that training never saw enter the slate.

    1. The retriever knows an item by its vector. It proposes W items, and one forward gives their
       likelihoods.
    2. If fewer than k are accepted, beam search begins. At each level, the retriever proposes items
       below the beams.
    3. The search ends as soon as k items are accepted. Otherwise the finished beams fill the slate.

    Scores are log-probabilities of semantic ids. Accepted items are ordered by draft: the first
    draft by nearness, later drafts by score.

    Source: Ding et al. 2024, arXiv 2410.02939.
    """

    name = "specgr"
    missing = "no retriever for this recommender; run `recserve train retriever`"

    def __init__(self, model: Recommender, retriever: DenseRetriever) -> None:
        self.model, self.retriever = model, retriever
        self.level_offsets = level_offsets_of(model)
        self.skip_single = model.config.normalization == "children"

    @classmethod
    def from_models(cls, model: Recommender, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender with a retriever."""
        if heads.retriever is None or not model.config.autoregressive:
            return None
        return cls(model, heads.retriever)

    def tree_capacity(self, request: SlateQuery) -> int:
        """Returns the nodes of the beams, the first draft and one draft per level, W items each."""
        levels = request.trie.num_levels - 1
        return request.width * (2 * levels + levels * (levels - 1) // 2)

    def start(self, sequences: Seq[Sequence]) -> SpecGRState:
        """Makes the first draft. The root's last hidden state scores its items' first codes."""
        began = time.perf_counter()
        search = BeamSearch.start(self.model, sequences, bounded=False)
        search.advance()
        items = specgr.draft_freely(search, self.retriever)
        state = SpecGRState(search, items, list(range(len(sequences))))
        self._settle(state)
        for sequence in sequences:
            sequence.timing.draft_ms += (time.perf_counter() - began) * 1e3
        return state

    def finished(self, state: SpecGRState) -> bool:
        """Returns whether every request has k accepted items, or its beams are leaves."""
        return state.pending is None and state.ended

    def propose(self, state: SpecGRState) -> Draft:
        """Returns the drafted items' prefixes, and from the second round on those of the beams."""
        keys = None if state.pending is None else state.pending.keys
        if keys is not None and not state.guided:
            return state.search.lay_out(keys, self.level_offsets)
        return state.search.propose(self.level_offsets, keys)

    def verify(
        self, state: SpecGRState, draft: PrefixDraft, slots: Tensor, hidden: Tensor
    ) -> SpecGRState:
        """Verifies the drafted items.

        Requests with too few accepted items advance their beams and draft again below them.
        """
        first = state.pending is not None and not state.guided
        trace_round(state.search, draft, "draft" if first else "search")
        state.search.record(draft, slots, hidden)
        self._settle(state)
        return state

    def finish(self, state: SpecGRState) -> Results:
        """Returns the slates."""
        return with_trees(specgr.slates(state.search, state.verified), state.search)

    def _settle(self, state: SpecGRState) -> None:
        """Verifies, advances and drafts until a forward is needed or all is done.

        Each level has exactly one draft, even if more prefixes are already scored. Otherwise a
        slate would depend on the other requests of the batch.
        """
        search = state.search
        while True:
            if state.pending is not None:
                if bool((search.scored.find(state.pending.keys) < 0).any()):
                    return
                self._verify_pending(state, state.pending)
            if state.ended:
                return
            level = search.beams.level
            if state.guided == level:
                search.advance(level + 1)
                if search.beams.level == level:
                    return
            if not state.ended:
                self._draft_again(state)

    def _verify_pending(self, state: SpecGRState, items: DraftedItems) -> None:
        """Verifies items, and ends the beams of requests with enough accepted items."""
        found = specgr.verify_items(state.search, items.owners, items.rows)
        found = found.likeliest_first() if state.guided else found
        state.verified, state.pending = state.verified.followed_by(found), None
        state.unfilled = specgr.unfilled(state.verified, state.search)
        specgr.end_filled(state.search, state.unfilled)

    def _draft_again(self, state: SpecGRState) -> None:
        search, verified = state.search, state.verified
        before = tuple(verified.rows[verified.owners == b] for b in range(len(search.sequences)))
        state.pending = specgr.draft_under_beams(search, self.retriever, state.unfilled, before)
        state.guided = search.beams.level
