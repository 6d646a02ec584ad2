"""Strategy `specgr`: a retriever drafts items, the target accepts the likely ones.

Beam search fills the remaining places.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Result, SlateQuery
from recserve.core.sequence import Sequence
from recserve.core.strategy import Draft, TreeStrategy
from recserve.models.dense_retriever import DenseRetriever
from recserve.models.recommender import Recommender
from recserve.search import specgr
from recserve.search import verify as beam_verify
from recserve.search.beams import Beams
from recserve.search.prefixes import PrefixDraft, draft_of_keys, propose_beams
from recserve.search.recommend_strategy import Heads, RecommendStrategy
from recserve.search.specgr import NO_VERIFIED_ITEMS, DraftedItems, VerifiedItems
from recserve.search.strategies.beam import level_offsets_of
from recserve.search.strategies.slate_trees import trace_round, with_trees


@dataclass(frozen=True)
class SpecGRState:
    """Requests whose drafted items are being verified.

    Attributes:
        beams: Beam search so far.
        pending: Drafted items that are not verified yet. None: there are none.
        verified: Items verified so far.
        guided: Level of the beams at the newest guided draft. 0: there was none.
        unfilled: Numbers of the requests with fewer than k accepted items.
    """

    beams: Beams
    pending: DraftedItems | None
    verified: VerifiedItems
    guided: int
    unfilled: tuple[int, ...]

    @property
    def ended(self) -> bool:
        """True when beam search, and drafting with it, is over."""
        return not self.unfilled or self.beams.finished


class SpecGRStrategy(TreeStrategy, RecommendStrategy):
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
        level_0 = beam_verify.begin(tuple(sequences), by_children=False)
        beams = beam_verify.start(level_0, self.model)
        items = specgr.draft_freely(beams, self.retriever, self.skip_single)
        unfilled = tuple(range(len(sequences)))
        state = self._settled(SpecGRState(beams, items, NO_VERIFIED_ITEMS, 0, unfilled))
        for sequence in sequences:
            sequence.timing.draft_ms += (time.perf_counter() - began) * 1e3
        return state

    def finished(self, state: SpecGRState) -> bool:
        """Returns whether every request has k accepted items, or its beams are leaves."""
        return state.pending is None and state.ended

    def propose(self, state: SpecGRState) -> Draft:
        """Returns the drafted items' prefixes, and from the second round on those of the beams."""
        beams, pending = state.beams, state.pending
        if pending is not None and not state.guided:
            draft = draft_of_keys(
                beams.trie, pending.keys, len(beams.sequences), self.level_offsets, beams.scored
            )
            return replace(draft, guessed=True)
        extra = None if pending is None else pending.keys
        return propose_beams(beams, self.level_offsets, self.skip_single, extra)

    def verify(
        self, state: SpecGRState, draft: PrefixDraft, slots: Tensor, hidden: Tensor
    ) -> SpecGRState:
        """Verifies the drafted items.

        Requests with too few accepted items advance their beams and draft again below them.
        """
        trace_round(state.beams, draft)
        beams = beam_verify.record(state.beams, draft, slots, hidden)
        return self._settled(replace(state, beams=beams))

    def finish(self, state: SpecGRState) -> Seq[Result | Continuation | NotFinite]:
        """Returns the slates."""
        return with_trees(specgr.slates(state.beams, state.verified), state.beams, self.model)

    def _settled(self, state: SpecGRState) -> SpecGRState:
        """Verifies, advances and drafts until a forward is needed or all is done.

        Each level has exactly one draft, even if more prefixes are already scored. Otherwise a
        slate would depend on the other requests of the batch.
        """
        while True:
            if state.pending is not None:
                if bool((state.beams.scored.find(state.pending.keys) < 0).any()):
                    return state
                state = self._with_verified(state, state.pending)
            if state.ended:
                return state
            if state.guided == state.beams.level:
                deeper = beam_verify.one_level_deeper(state.beams, self.model)
                if deeper is None:
                    return state
                state = replace(state, beams=deeper)
            if not state.ended:
                state = self._drafted_again(state)

    def _with_verified(self, state: SpecGRState, items: DraftedItems) -> SpecGRState:
        """Verifies items, and ends the beams of requests with enough accepted items."""
        found = specgr.verify_items(state.beams, items.owners, items.rows, self.model)
        verified = state.verified.followed_by(found.likeliest_first() if state.guided else found)
        unfilled = specgr.unfilled(verified, state.beams)
        beams = specgr.end_filled(state.beams, unfilled)
        return replace(
            state, beams=beams, verified=verified, pending=None, unfilled=tuple(unfilled)
        )

    def _drafted_again(self, state: SpecGRState) -> SpecGRState:
        beams, verified = state.beams, state.verified
        before = tuple(verified.rows[verified.owners == b] for b in range(len(beams.sequences)))
        items = specgr.draft_under_beams(
            beams, self.retriever, state.unfilled, before, self.skip_single
        )
        return replace(state, pending=items, guided=beams.level)
