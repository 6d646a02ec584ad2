"""Strategy `speculative`: full beam search whose prefixes are drafted in advance."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from recserve.core.acceptance_watch import DraftWatch
from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Result, SlateQuery
from recserve.core.sequence import Sequence
from recserve.core.strategy import Draft
from recserve.kernels.host import on_device
from recserve.kernels.trie.level_search import DEAD
from recserve.models.item_heads import Calibration, DraftPlan, SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.search import rerank
from recserve.search import verify as beam_verify
from recserve.search.beams import Beams
from recserve.search.expansion import NO_BOUND
from recserve.search.head_search import likely_prefixes
from recserve.search.prefixes import PrefixDraft, draft_of_keys
from recserve.search.proof_cache import (
    CachedDraft,
    cache_proof,
    cache_scored,
    cached_drafts,
    is_plain,
    keys_of,
)
from recserve.search.recommend_strategy import Heads
from recserve.search.strategies.beam import BeamStrategy, request_of
from recserve.search.strategies.slate_trees import trace_round

NO_DRAFT = DraftPlan(0.0, 0.0, 0.0, 1.0)
# The plan of a head without a calibration: it always drafts.
UNCALIBRATED = DraftPlan(2.0, 0.0, 0.0, 1.0)
ROUND_NODES = 20  # nodes of one forward that cost about as much as another round
# Draft only below this share of beam search's work: the head's own search costs the rest.
MAX_WORK_SHARE = 0.8
MAX_REPAIRS = 3  # repair rounds before the search goes level by level


class SpeculativeStrategy(BeamStrategy):
    """Full beam search with prefixes drafted by a draft head.

    One forward scores the drafted tree. The verifier is that of `beam`, so the slate is the same
    and only the number of rounds differs. Further rounds score prefixes that the draft lacked, as
    far as they can still change the slate.

    The prefixes that proved a slate are stored with the cached root. They are the draft when the
    same request comes again, in any batch. For other requests, `draft_plan` chooses how wide to
    draft. Where drafting does not pay, the strategy is beam search. A watch compares the rounds
    that drafts save with the calibration, and pauses drafts while they save none.
    """

    name = "speculative"
    auto = "preferred"
    watch: DraftWatch
    missing = "no draft head was trained; run `recserve train drafter --name speculative`"

    def __init__(
        self,
        model: Recommender,
        head: SelfDraftHead,
        only: DraftPlan | None = None,
        caches: bool = True,
    ) -> None:
        """Makes the strategy of one recommender and its draft head.

        Args:
            model: The target model.
            head: Proposes prefixes.
            only: The plan for every request. None lets `draft_plan` choose.
            caches: Whether drafts are stored with cached roots.
        """
        super().__init__(model)
        self.head, self.only, self.caches = head, only, caches
        self.watch = DraftWatch(self.name, break_even=0.0, pauses=only is None)

    @classmethod
    def from_models(cls, model: Recommender, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender with a draft head."""
        if heads.prefixes is None or not model.config.autoregressive:
            return None
        return cls(model, heads.prefixes)

    def plan(self, request: SlateQuery) -> DraftPlan:
        """Returns how wide to draft for a request that has no cached draft."""
        return self.only or draft_plan(self.head.calibration, request.width, request.k)

    def tree_capacity(self, request: SlateQuery) -> int:
        """Returns the nodes of the plan, of all repairs, and of beam search itself."""
        sizes = request.trie.level_sizes[1 : request.trie.num_levels]
        drafted = sum(min(math.ceil(self.plan(request).margin * request.width), s) for s in sizes)
        repair = sum(min(request.width, size) for size in sizes)
        return drafted + MAX_REPAIRS * repair + super().tree_capacity(request)

    def start(self, sequences: Seq[Sequence]) -> Beams:
        """Starts like beam search. A captured search runs only where nothing is drafted."""
        if self.recorded is not None and self._drafts(sequences):
            return self.begin(sequences)
        return super().start(sequences)

    def propose(self, state: Beams) -> Draft:
        """Returns the draft in the first round, and the missing prefixes in a repair round."""
        dense_candidates = rerank.dense_candidate_keys(state)
        if state.missing is not None:
            keys = (
                state.missing
                if dense_candidates is None
                else torch.cat([state.missing, dense_candidates])
            )
            return self._guess(state, keys)
        if state.finished or state.scored.keys.shape[0]:
            return self._draft(state, dense_candidates)
        if not self._drafts(state.sequences):
            return self._draft(state, dense_candidates)
        drafts = self._cached(state.sequences)
        margins = [self.plan(request).margin for request in state.requests]
        for sequence, draft, margin in zip(state.sequences, drafts, margins, strict=True):
            sequence.timing.drafted = margin > 0 or draft is not None
        keys = self._drafted(state, drafts, margins)
        keys = keys if dense_candidates is None else torch.cat([keys, dense_candidates])
        return replace(self._guess(state, keys), cached=any(drafts))

    def verify(self, state: Beams, draft: PrefixDraft, slots: Tensor, hidden: Tensor) -> Beams:
        """Searches over all scored prefixes together; after MAX_REPAIRS repairs, level by level.

        Beam search may need further prefixes for requests that were already proved.
        """
        if not draft.guessed:
            return super().verify(state, draft, slots, hidden)
        trace_round(state, draft)
        scored = beam_verify.record(state, draft, slots, hidden)
        scored = replace(rerank.with_dense_candidate_scores(scored, self.model), missing=None)
        drafts = cached_drafts(scored.sequences) if draft.cached else []
        trims = any(own and not own.trimmed for own in drafts)
        found = beam_verify.search_scored(scored, self.model, trims)
        if found.proven:
            if trims:
                cache_proof(scored, found.needed)
            return found.beams
        if scored.repairs < MAX_REPAIRS:
            return replace(scored, missing=found.missing, repairs=scored.repairs + 1)
        return beam_verify.advance(scored, self.model)

    def _observe(self, state: Beams) -> None:
        """Records how many rounds each draft of the head saved.

        Like the calibration, the watch covers requests without filter and caps.
        """
        if self.only is not None:
            return
        for sequence, request, cached in zip(
            state.sequences, state.requests, self._cached(state.sequences), strict=True
        ):
            if not sequence.timing.drafted or cached is not None or not is_plain(request):
                continue
            repairs = max(sequence.rounds - 1, 0)
            gain, calibrated = 1.0 - repairs, None
            if self.head.calibration is not None:
                plans = self.head.calibration.scaled(request.width, request.k)
                plan = cheapest_draft(plans)
                beam = min((work(each) for each in plans if not each.margin), default=work(plan))
                calibrated = (beam - work(plan)) / ROUND_NODES
                gain = calibrated + plan.repairs - repairs
            self.watch.add(gain, 1, int(not repairs), calibrated)

    def _guess(self, state: Beams, keys: Tensor) -> PrefixDraft:
        count = len(state.sequences)
        trees = draft_of_keys(state.trie, keys, count, self.level_offsets, state.scored)
        return replace(trees, guessed=True)

    def _cached(self, sequences: Seq[Sequence]) -> list[CachedDraft | None]:
        return cached_drafts(sequences) if self.caches else [None] * len(sequences)

    def _drafted(
        self, state: Beams, drafts: list[CachedDraft | None], margins: list[float]
    ) -> Tensor:
        """Returns keys (as in `Scored`) of cached drafts, and of head drafts for the rest."""
        if not any(drafts):
            return self._likely(state, margins)
        if all(drafts):
            return keys_of(drafts, state)
        there = on_device([draft is not None for draft in drafts], state.nodes.device)
        others = replace(state, log_probs=state.log_probs.masked_fill(there[:, None], DEAD))
        return torch.cat([keys_of(drafts, state), self._likely(others, margins)])

    def _likely(self, state: Beams, margins: list[float]) -> Tensor:
        """Returns keys of the prefixes that the head drafts, each request by its margin."""
        requests = state.requests
        widths = [math.ceil(m * r.width) for m, r in zip(margins, requests, strict=True)]
        free = [r.caps or r.dense_weight or not self.skip_single for r in requests]
        # The floor: the score of the item at rank margin * k. Without a bound, nothing is cut off.
        places = [
            NO_BOUND if any_item else max(math.ceil(m * r.k) - 1, 0)
            for m, r, any_item in zip(margins, requests, free, strict=True)
        ]
        return likely_prefixes(state, self.head, widths, places, self.skip_single)

    def finish(self, state: Beams) -> Seq[Result | Continuation | NotFinite]:
        """Caches the scored prefixes, watches the drafts, and returns the slates."""
        self._observe(state)
        if self.caches:
            cache_scored(state)
        return super().finish(state)

    def _drafts(self, sequences: Seq[Sequence]) -> bool:
        """Returns whether the first round of a batch scores a draft.

        It does if all requests have a cached draft, or if a plan of one of them drafts.
        """
        if all(self._cached(sequences)):
            return True
        if self.watch.paused:
            return self.watch.allows()
        return any(self.plan(request_of(sequence)).margin for sequence in sequences)


def draft_plan(calibration: Calibration | None, width: int, k: int) -> DraftPlan:
    """Returns the plan with the least work, or NO_DRAFT if beam search is about as cheap.

    A verified draft gives the slate of beam search, so a plan affects speed only. The rule reads no
    clock. It compares the work of a plan with that of beam search, as measured on validation users.

    Args:
        calibration: Measured plans of the draft head. None: the head was not calibrated.
        width: Beam width of the request.
        k: Number of items of the request.
    """
    if calibration is None:
        return UNCALIBRATED
    plans = calibration.scaled(width, k)
    best = cheapest_draft(plans)
    beam = min((work(plan) for plan in plans if not plan.margin), default=float("inf"))
    return best if work(best) < MAX_WORK_SHARE * beam else NO_DRAFT


def cheapest_draft(plans: list[DraftPlan]) -> DraftPlan:
    """Returns the plan that drafts with the least work, NO_DRAFT if no plan drafts."""
    return min((plan for plan in plans if plan.margin), key=work, default=NO_DRAFT)


def work(plan: DraftPlan) -> float:
    """Returns the expected work of a plan, in nodes."""
    return plan.nodes + ROUND_NODES * (1 + plan.repairs)
