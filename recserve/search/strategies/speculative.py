"""Strategy `speculative`: full beam search whose prefixes are drafted in advance.

The prefixes that proved a slate are cached with the user's history. When the same request comes
again, one forward pass scores them and proves the slate. It needs neither the draft head nor
another round.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Self

import numpy as np
import torch
from torch import Tensor

from recserve.core.draft_policy import DraftPolicy, best_option
from recserve.core.request import SlateQuery
from recserve.core.sequence import SearchSequence, request_of
from recserve.core.slate_tree import Origin
from recserve.core.strategy import Draft, Results
from recserve.kernels.host import on_device
from recserve.kernels.trie.level_search import DEAD
from recserve.kernels.trie.native import StateKind
from recserve.kernels.trie.trie import Trie
from recserve.models.item_heads import Calibration, DraftPlan, SelfDraftHead
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.search.beam_search import NO_THRESHOLD, BeamSearch, HeadScores, descend
from recserve.search.dense_candidates import score_ready_candidates, unscored_candidate_keys
from recserve.search.strategies.beam import BeamStrategy
from recserve.search.strategies.slate_trees import trace_round
from recserve.search.strategy import Heads
from recserve.search.trie_paths import PathDraft

NO_DRAFT = DraftPlan(0.0, 0.0, 0.0, 1.0)
# The plan of a head without a calibration: it always drafts.
UNCALIBRATED = DraftPlan(2.0, 0.0, 0.0, 1.0)
ROUND_NODES = 20  # nodes of one forward that cost about as much as another round
# Draft only below this share of beam search's work: the head's own search costs the rest.
MAX_WORK_SHARE = 0.8
MAX_EXTRA_ROUNDS = 3  # before the search goes level by level


class SpeculativeStrategy(BeamStrategy):
    """Full beam search with prefixes drafted by a draft head.

    One forward scores the drafted tree. The verifier is that of `beam`, so the slate is the same
    and only the number of rounds differs. Further rounds score prefixes that the draft lacked, as
    far as they can still change the slate.

    The prefixes that proved a slate are stored with the cached prefix. They are the draft when the
    same request comes again, in any batch. For other requests, `PlanPolicy` chooses how wide to
    draft. Where drafting does not pay, the strategy is beam search.
    """

    name = "speculative"
    auto = "preferred"
    captured_search = "beam"
    policy: PlanPolicy
    missing = "no draft head was trained; run `recserve train drafter --name speculative`"

    def __init__(
        self,
        model: SemanticIdModel,
        head: SelfDraftHead,
        only: DraftPlan | None = None,
        caches: bool = True,
    ) -> None:
        """Makes the strategy of one recommender and its draft head.

        Args:
            model: The target model.
            head: Proposes prefixes.
            only: The plan for every request. None lets the calibration choose.
            caches: Whether drafts are stored with cached prefixes.
        """
        super().__init__(model)
        self.head, self.caches = head, caches
        self.policy = PlanPolicy(self.name, head, only)

    @classmethod
    def from_models(cls, model: SemanticIdModel, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender with a draft head."""
        if heads.prefixes is None or not model.config.autoregressive:
            return None
        return cls(model, heads.prefixes)

    def tree_capacity(self, request: SlateQuery) -> int:
        """Returns the nodes of the plan, of all extra rounds, and of beam search itself."""
        sizes = request.trie.level_sizes[1 : request.trie.num_levels]
        drafted = sum(
            min(math.ceil(self.policy.plan(request).margin * request.width), s) for s in sizes
        )
        repair = sum(min(request.width, size) for size in sizes)
        return drafted + MAX_EXTRA_ROUNDS * repair + super().tree_capacity(request)

    def can_replay(self, sequences: Seq[SearchSequence]) -> bool:
        """Returns whether nothing is drafted: then the search is that of `beam`."""
        return not self._drafts(sequences)

    def propose(self, state: BeamSearch) -> Draft:
        """Returns the draft in the first round, and the unscored prefixes in an extra round."""
        if state.unscored_keys is not None:
            return self._guess(state, state.unscored_keys)
        first = not state.is_finished and not state.scored.keys.shape[0]
        if not first or not self._drafts(state.sequences):
            return super().propose(state)
        drafts = self._cached_drafts(state.sequences)
        margins = [self.policy.plan(request).margin for request in state.requests]
        for sequence, draft, margin in zip(state.sequences, drafts, margins, strict=True):
            sequence.timing.drafted = margin > 0 or draft is not None
        guess = self._guess(state, self._draft_keys(state, drafts, margins))
        return replace(guess, cached=any(drafts))

    def verify(
        self, state: BeamSearch, draft: PathDraft, slots: Tensor, hidden: Tensor
    ) -> BeamSearch:
        """Proves the slate over all scored prefixes, or asks for those that are missing.

        After MAX_EXTRA_ROUNDS the search goes level by level. It may then need further prefixes
        for requests that were already proved.
        """
        origin: Origin = "repair" if state.extra_rounds else "draft" if draft.guessed else "search"
        trace_round(state, draft, origin)
        state.record(draft, slots, hidden)
        score_ready_candidates(state)
        state.unscored_keys = None
        if not draft.guessed:
            state.advance()
            return state
        found = state.verify_draft()
        if found.proven:
            drafts = cached_drafts(state.sequences) if draft.cached else []
            if any(own and not own.trimmed for own in drafts):
                cache_proof(state, found.path_keys(StateKind.KNOWN))
            state.beams = found.last
        elif state.extra_rounds < MAX_EXTRA_ROUNDS:
            state.unscored_keys = found.path_keys(StateKind.MISSING)
            state.extra_rounds += 1
        else:
            state.advance()
        return state

    def _record_drafts(self, state: BeamSearch) -> None:
        """Records how many further rounds each draft of the head needed.

        Like the calibration, the record covers requests without filter and caps.
        """
        cached = self._cached_drafts(state.sequences)
        for sequence, request, draft in zip(state.sequences, state.requests, cached, strict=True):
            if sequence.timing.drafted and draft is None and is_plain(request):
                self.policy.add(request, repairs=max(sequence.rounds - 1, 0))

    def _guess(self, state: BeamSearch, keys: Tensor) -> PathDraft:
        """Returns a draft of prefixes, with those of the dense candidates."""
        if (extra := unscored_candidate_keys(state)) is not None:
            keys = torch.cat([keys, extra])
        return replace(state.lay_out(keys, self.level_offsets), guessed=True)

    def _cached_drafts(self, sequences: Seq[SearchSequence]) -> list[CachedDraft | None]:
        return cached_drafts(sequences) if self.caches else [None] * len(sequences)

    def _draft_keys(
        self, state: BeamSearch, drafts: list[CachedDraft | None], margins: list[float]
    ) -> Tensor:
        """Returns keys of cached drafts, and of head drafts for the rest."""
        if all(drafts):
            return keys_of(drafts, state)
        requests, beams = state.requests, state.beams
        widths = [math.ceil(m * r.width) for m, r in zip(margins, requests, strict=True)]
        free = [r.caps or r.dense_weight or not self.skip_single for r in requests]
        # The threshold: the score of the item at rank margin * k. Without one, nothing is left out.
        ranks = [
            NO_THRESHOLD if any_item else max(math.ceil(m * r.k) - 1, 0)
            for m, r, any_item in zip(margins, requests, free, strict=True)
        ]
        if any(drafts):
            there = on_device([draft is not None for draft in drafts], beams.nodes.device)
            beams = replace(beams, log_probs=beams.log_probs.masked_fill(there[:, None], DEAD))
        search = replace(state, beams=beams, widths=widths, threshold_ranks=ranks)
        keys = draft_paths(search, self.head)
        return torch.cat([keys_of(drafts, state), keys]) if any(drafts) else keys

    def finish(self, state: BeamSearch) -> Results:
        """Caches the scored prefixes, records the drafts, and returns the slates."""
        self._record_drafts(state)
        if self.caches:
            cache_scored(state)
        return super().finish(state)

    def _drafts(self, sequences: Seq[SearchSequence]) -> bool:
        """Returns whether the first round of a batch scores a draft.

        It does if all requests have a cached draft, or if a plan of one of them drafts.
        """
        if all(self._cached_drafts(sequences)):
            return True
        record = self.policy.record(self.name)
        if record.paused:
            return record.allows()
        return any(
            self.policy.plan(request_of(sequence, SlateQuery)).margin for sequence in sequences
        )


class PlanPolicy(DraftPolicy):
    """Chooses how wide a draft head drafts, and compares the rounds that it saves.

    A verified draft gives the slate of beam search, so a plan affects speed only. The choice reads
    no clock. It compares the work of the plans, as measured on validation users.

    Attributes:
        only: The plan for every request. None lets the calibration choose.
    """

    def __init__(self, drafter: str, head: SelfDraftHead, only: DraftPlan | None = None) -> None:
        """Args: drafter: name of the record; head: its calibration holds the measured plans."""
        super().__init__(break_even=0.0, pauses=only is None)
        self.only, self._drafter, self._head = only, drafter, head
        self.record(drafter)

    @property
    def calibration(self) -> Calibration | None:
        """The head's measured plans. None: the head was not calibrated."""
        return self._head.calibration

    def plan(self, request: SlateQuery) -> DraftPlan:
        """Returns the plan with the least work, or NO_DRAFT if beam search is about as cheap."""
        if self.only is not None:
            return self.only
        if self.calibration is None:
            return UNCALIBRATED
        plans = self.calibration.scaled(request.width, request.k)
        beam = min((work(plan) for plan in plans if not plan.margin), default=float("inf"))
        drafts = [plan for plan in plans if plan.margin]
        costs = [beam, *map(work, drafts)]
        gains = [0.0] * len(costs)  # every plan gives one slate
        return [NO_DRAFT, *drafts][best_option(gains, costs, margin=1 / MAX_WORK_SHARE)]

    def add(self, request: SlateQuery, repairs: int) -> None:
        """Records a verified draft of the head and its further rounds.

        Its gain is the number of rounds that it saves. Pauses drafts while they save none.
        """
        if self.only is not None:
            return
        gain, calibrated = 1.0 - repairs, None
        if self.calibration is not None:
            plans = self.calibration.scaled(request.width, request.k)
            plan = cheapest_draft(plans)
            beam = min((work(each) for each in plans if not each.margin), default=work(plan))
            calibrated = (beam - work(plan)) / ROUND_NODES
            gain = calibrated + plan.repairs - repairs
        self.record(self._drafter).add(gain, 1, int(not repairs), calibrated)


def cheapest_draft(plans: Seq[DraftPlan]) -> DraftPlan:
    """Returns the plan that drafts with the least work, NO_DRAFT if no plan drafts."""
    return min((plan for plan in plans if plan.margin), key=work, default=NO_DRAFT)


def work(plan: DraftPlan) -> float:
    """Returns the expected work of a plan, in nodes."""
    return plan.nodes + ROUND_NODES * (1 + plan.repairs)


def draft_paths(search: BeamSearch, head: SelfDraftHead) -> Tensor:
    """Returns keys of the prefixes that the head's own search visits.

    The search starts from proved beams, so the first level is exact. Prefixes that need no score
    are left out, and those below the found item at the threshold's rank. With a prefix come all
    prefixes above it.

    Args:
        search: Proved beams, and how wide the head searches below them.
        head: The draft head.
    """
    assert search.threshold_ranks is not None
    scores = HeadScores(search.trie, head, search.last_hidden, head.contexts(search.last_hidden))
    found = descend(search, scores, item_ranks=search.threshold_ranks)
    return found.path_keys(StateKind.KNOWN if search.skip_single else StateKind.ANY)


@dataclass(frozen=True)
class CachedDraft:
    """Prefixes that proved a slate. Scored in one forward, they prove the same slate again.

    Attributes:
        trie: Catalogue version of the request. The reference is weak.
        width: Beam width of the request.
        k: Number of items of the slate.
        dense_weight: Weight of the dense head.
        excluded: Digest of the excluded rows. A request may name thousands of rows.
        nodes: [n] int64 ascending trie nodes. The tensor owns its memory.
        trimmed: True once unneeded nodes have been removed.
    """

    trie: weakref.ref[Trie]
    width: int
    k: int
    dense_weight: float
    excluded: bytes
    nodes: Tensor
    trimmed: bool = False

    @staticmethod
    def of(request: SlateQuery, nodes: Tensor) -> CachedDraft:
        """Returns the draft for a request whose slate these nodes proved."""
        return CachedDraft(
            weakref.ref(request.trie),
            request.width,
            request.k,
            request.dense_weight,
            _digest(request.excluded),
            nodes.clone(),  # a view would keep the tensor of the whole step alive
        )

    def fits(self, request: SlateQuery) -> bool:
        """Returns whether a plain request on the same prefix equals the draft's request."""
        return (
            self.trie() is request.trie
            and (self.width, self.k) == (request.width, request.k)
            and self.dense_weight == request.dense_weight
            and is_plain(request)
            and self.excluded == _digest(request.excluded)
        )


def is_plain(request: SlateQuery) -> bool:
    """Returns whether a request has no filter, caps or unwanted items: its drafts are cached."""
    return request.allowed is None and not request.caps and request.unwanted is None


def _digest(excluded: np.ndarray | None) -> bytes:
    """Returns a digest of excluded rows in their order. None counts as an empty array."""
    rows = np.empty(0, np.int64) if excluded is None else excluded.astype(np.int64)
    return blake2b(rows.tobytes(), digest_size=16).digest()


def cached_drafts(sequences: Seq[SearchSequence]) -> list[CachedDraft | None]:
    """Returns the cached draft of each recommend request. None where there is none."""
    drafts = [(sequence.cached_prefix.draft, sequence.request) for sequence in sequences]
    return [
        draft
        if isinstance(draft, CachedDraft)
        and isinstance(request, SlateQuery)
        and draft.fits(request)
        else None
        for draft, request in drafts
    ]


def keys_of(drafts: Seq[CachedDraft | None], search: BeamSearch) -> Tensor:
    """Returns the keys of the nodes of all cached drafts."""
    size, keys = search.trie.num_nodes, [search.beams.nodes[:0, 0]]
    keys += [draft.nodes + number * size for number, draft in enumerate(drafts) if draft]
    return torch.cat(keys)


def cache_scored(search: BeamSearch) -> None:
    """Caches all scored prefixes of plain requests that have no cached draft."""
    drafts = cached_drafts(search.sequences)
    if not search.scored.keys.shape[0] or all(drafts):
        return
    # Every node that was computed is scored, so the host knows how many each request has.
    sizes = [sequence.tree_used for sequence in search.sequences]
    nodes = torch.split(search.scored.keys % search.trie.num_nodes, sizes)
    for sequence, request, own, draft in zip(
        search.sequences, search.requests, nodes, drafts, strict=True
    ):
        if draft is None and is_plain(request):
            sequence.cached_prefix.draft = CachedDraft.of(request, own)


def cache_proof(search: BeamSearch, needed: Tensor) -> None:
    """Caches only the scored prefixes that the proofs of plain requests need.

    The host waits once for the device.

    Args:
        search: The requests.
        needed: [n] keys, each with all prefixes above it.
    """
    needed = torch.unique(needed)
    size, count = search.trie.num_nodes, len(search.sequences)
    sizes = torch.bincount(needed // size, minlength=count).tolist()
    nodes = torch.split(needed % size, sizes)
    for sequence, request, own in zip(search.sequences, search.requests, nodes, strict=True):
        if is_plain(request):
            sequence.cached_prefix.draft = replace(CachedDraft.of(request, own), trimmed=True)
