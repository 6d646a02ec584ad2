"""Full beam search, its prefixes drafted ahead."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from recserve.core.finite import NotFinite
from recserve.core.prefix_metadata import CachedDraft
from recserve.core.request import Continuation, Result, SlateQuery
from recserve.core.sequence import Sequence
from recserve.core.strategy import Draft
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie_children import DEAD
from recserve.models.drafters.calibration import Calibration, DraftPlan
from recserve.models.drafters.prefix_head import PrefixHead
from recserve.models.recommender import Recommender
from recserve.search import rerank
from recserve.search import verify as beam_verify
from recserve.search.beams import Beams
from recserve.search.expansion import NO_BOUND
from recserve.search.head_search import likely_prefixes
from recserve.search.prefixes import PrefixDraft, draft_of_keys
from recserve.search.proof_cache import cache_proof, cache_scored, cached_drafts, keys_of
from recserve.search.recommend_strategy import Heads
from recserve.search.strategies.beam import BeamStrategy, request_of

NO_DRAFT = DraftPlan(0.0, 0.0, 0.0, 1.0)
# The plan of a head without a calibration: nothing is known of it, so it always drafts.
UNCALIBRATED = DraftPlan(2.0, 0.0, 0.0, 1.0)
ROUND_NODES = 20  # a round costs about as much as so many more nodes in one forward
MAX_WORK_SHARE = 0.8  # largest share of beam search's work; the head's own search takes the rest
MAX_REPAIRS = 3  # rounds of what was missing, before a level is taken at a time


class SpeculativeStrategy(BeamStrategy):
    """Full beam search, its prefixes drafted ahead by a draft head.

    One forward scores the drafted tree. The verifier is that of `beam`, so the slate is the same
    and only the number of rounds differs. Further rounds score what the draft missed, as far as it
    can still change the slate. The prefixes that proved a slate stay with the cached root. They are
    the draft when the same request comes again, in any batch. For other requests a rule picks the
    plan of the head's calibration (`draft_plan`). Where drafting does not pay, the strategy
    is beam search.
    """

    name = "speculative"
    auto = "preferred"
    missing = "no draft head was trained; run `recserve train drafter --name speculative`"

    def __init__(
        self,
        model: Recommender,
        head: PrefixHead,
        only: DraftPlan | None = None,
        caches: bool = True,
    ) -> None:
        """Makes the strategy of one recommender and its draft head.

        Args:
            model: The target model.
            head: Proposes prefixes.
            only: The plan of every request. None lets the rule choose.
            caches: Whether drafts stay with cached roots.
        """
        super().__init__(model)
        self.head, self.only, self.caches = head, only, caches

    @classmethod
    def from_models(cls, model: Recommender, heads: Heads) -> Self | None:
        """For a recommender with a draft head."""
        if heads.prefixes is None or not model.config.autoregressive:
            return None
        return cls(model, heads.prefixes)

    def plan(self, request: SlateQuery) -> DraftPlan:
        """Returns how wide to draft for a request that has no cached draft."""
        return self.only or draft_plan(self.head.calibration, request.width, request.k)

    def tree_capacity(self, request: SlateQuery) -> int:
        """The plan's nodes at each level but the last, those of all repairs, and all of beam
        search's own.
        """
        sizes = request.trie.level_sizes[1 : request.trie.num_levels]
        drafted = sum(min(math.ceil(self.plan(request).margin * request.width), s) for s in sizes)
        repair = sum(min(request.width, size) for size in sizes)
        return drafted + MAX_REPAIRS * repair + super().tree_capacity(request)

    def start(self, sequences: Seq[Sequence]) -> Beams:
        """As beam search; what is recorded searches only where nothing is drafted."""
        if self.recorded is not None and self._drafts(sequences):
            return self.begin(sequences)
        return super().start(sequences)

    def propose(self, state: Beams) -> Draft:
        """At first all that the head thinks likely; in a repair round what is missing."""
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
        """At first, and after MAX_REPAIRS, whatever the scored prefixes prove together; after that
        level by level, as beam search, which needs more where a request was proved already.
        """
        if not draft.guessed:
            return super().verify(state, draft, slots, hidden)
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

    def _guess(self, state: Beams, keys: Tensor) -> PrefixDraft:
        count = len(state.sequences)
        trees = draft_of_keys(state.trie, keys, count, self.level_offsets, state.scored)
        return replace(trees, guessed=True)

    def _cached(self, sequences: Seq[Sequence]) -> list[CachedDraft | None]:
        return cached_drafts(sequences) if self.caches else [None] * len(sequences)

    def _drafted(
        self, state: Beams, drafts: list[CachedDraft | None], margins: list[float]
    ) -> Tensor:
        """Keys (as in Scored) of cached drafts and, for other requests, of the head's draft."""
        if not any(drafts):
            return self._likely(state, margins)
        if all(drafts):
            return keys_of(drafts, state)
        there = on_device([draft is not None for draft in drafts], state.nodes.device)
        others = replace(state, log_probs=state.log_probs.masked_fill(there[:, None], DEAD))
        return torch.cat([keys_of(drafts, state), self._likely(others, margins)])

    def _likely(self, state: Beams, margins: list[float]) -> Tensor:
        requests = state.requests
        widths = [math.ceil(m * r.width) for m, r in zip(margins, requests, strict=True)]
        free = [r.caps or r.dense_weight or not self.skip_single for r in requests]
        places = [
            NO_BOUND if any_item else max(math.ceil(m * r.k) - 1, 0)
            for m, r, any_item in zip(margins, requests, free, strict=True)
        ]
        return likely_prefixes(state, self.head, widths, places, self.skip_single)

    def finish(self, state: Beams) -> Seq[Result | Continuation | NotFinite]:
        """Slates."""
        if self.caches:
            cache_scored(state)
        return super().finish(state)

    def _drafts(self, sequences: Seq[Sequence]) -> bool:
        """Whether the first round of a group scores a draft: all have a cached one, or it pays."""
        if all(self._cached(sequences)):
            return True
        return any(self.plan(request_of(sequence)).margin for sequence in sequences)


def draft_plan(calibration: Calibration | None, width: int, k: int) -> DraftPlan:
    """Returns the plan with the least work, or NO_DRAFT where beam search is about as cheap.

    Args:
        calibration: Measured plans of the draft head, or None.
        width: Beam width of the request.
        k: Items that the request asks for.
    """
    if calibration is None:
        return UNCALIBRATED
    plans = calibration.scaled(width, k)
    best = cheapest_draft(plans)
    beam = min((work(plan) for plan in plans if not plan.margin), default=float("inf"))
    return best if work(best) < MAX_WORK_SHARE * beam else NO_DRAFT


def cheapest_draft(plans: list[DraftPlan]) -> DraftPlan:
    """Returns the plan that drafts with the least work, NO_DRAFT if none drafts."""
    return min((plan for plan in plans if plan.margin), key=work, default=NO_DRAFT)


def work(plan: DraftPlan) -> float:
    """Returns the expected work of a plan, in nodes."""
    return plan.nodes + ROUND_NODES * (1 + plan.repairs)
