"""The retriever proposes items, the target accepts what it thinks likely; beam search fills up."""

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


@dataclass(frozen=True)
class SpecGRState:
    """Requests whose proposed items are being verified.

    pending: proposed and not yet verified; None: nothing is. guided: the beams' level at the newest
    guided draft, 0: there was none. unfilled: numbers of the requests without k accepted items.
    """

    beams: Beams
    pending: DraftedItems | None
    verified: VerifiedItems
    guided: int
    unfilled: tuple[int, ...]

    @property
    def ended(self) -> bool:
        """Whether beam search, and drafting with it, is over."""
        return not self.unfilled or self.beams.finished


class SpecGRStrategy(TreeStrategy, RecommendStrategy):
    """SpecGR: items that training never saw have their place on the slate.

    The retriever, which knows an item by its vector, proposes W items; one forward gives their
    likelihoods. Where fewer than k are accepted beam search begins, and at each of its levels the
    retriever proposes again, below the beams. It ends as soon as k are accepted; else the finished
    beams fill the slate up. Scores are log-probabilities of semantic ids; the accepted items stand
    in the order of the drafts: of the first by nearness, of later ones by score.
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
        """For a recommender with a retriever."""
        if heads.retriever is None or not model.config.autoregressive:
            return None
        return cls(model, heads.retriever)

    def tree_capacity(self, request: SlateQuery) -> int:
        """The beams; W items drafted freely, and W below the beams of each level."""
        levels = request.trie.num_levels - 1
        return request.width * (2 * levels + levels * (levels - 1) // 2)

    def start(self, sequences: Seq[Sequence]) -> SpecGRState:
        """The first draft; its items' first codes come with the root's last hidden state."""
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
        """True when every request has k accepted items, or its beams are leaves."""
        return state.pending is None and state.ended

    def propose(self, state: SpecGRState) -> Draft:
        """The drafted items' prefixes, and from the second round on those of the beams."""
        beams, pending = state.beams, state.pending
        if pending is not None and not state.guided:
            return draft_of_keys(
                beams.trie, pending.keys, len(beams.sequences), self.level_offsets, beams.scored
            )
        extra = None if pending is None else pending.keys
        return propose_beams(beams, self.level_offsets, self.skip_single, extra)

    def verify(
        self, state: SpecGRState, draft: PrefixDraft, slots: Tensor, hidden: Tensor
    ) -> SpecGRState:
        """Items verified; where some are unfilled beams a level deeper, and a draft below them."""
        beams = beam_verify.record(state.beams, draft, slots, hidden)
        return self._settled(replace(state, beams=beams))

    def finish(self, state: SpecGRState) -> Seq[Result | Continuation | NotFinite]:
        """Slates."""
        return specgr.slates(state.beams, state.verified)

    def _settled(self, state: SpecGRState) -> SpecGRState:
        """Judge, go a level deeper and draft below, until a forward is needed or nothing is left.

        One draft for each level, however much is scored already: else a slate would depend on the
        requests that step beside it.
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
        """Beams end for the requests that have enough."""
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
