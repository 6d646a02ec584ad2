"""Full beam search, its prefixes drafted ahead."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from recserve.core.drafting import Draft
from recserve.core.finite import NotFinite
from recserve.core.request import Again, RecommendRequest, Result
from recserve.core.root_notes import KeptDraft, is_plain
from recserve.core.sequence import Sequence
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie_children import DEAD
from recserve.models.drafters.calibration import DraftPlan
from recserve.models.drafters.prefix_head import PrefixHead
from recserve.models.recommender import Recommender
from recserve.search import rerank
from recserve.search import verify as beam_verify
from recserve.search.beams import Beams
from recserve.search.bounds import NEVER
from recserve.search.head_search import likely_prefixes
from recserve.search.kept import keep, kept, keys_of, trim
from recserve.search.plan_choice import NOT_CALIBRATED, Group, PlanChoice
from recserve.search.prefixes import PrefixDraft, draft_of_keys
from recserve.search.step_costs import StepCosts, Ways
from recserve.search.strategies.beam import BeamStrategy, request_of

REPAIRS = 3  # rounds of what was missing, before a level is taken at a time


@dataclass(frozen=True)
class _Asked:
    """A group that began to be answered."""

    group: Group
    began_s: float


class SpeculativeStrategy(BeamStrategy):
    """Full beam search, its prefixes drafted ahead by a draft head.

    One forward scores the drafted tree; the verifier is that of `beam`, so the answer is the same
    and only the number of rounds differs. The draft leaves out what lies below the score that the
    k-th item is thought to reach. What it missed is scored in further rounds, as far as it could
    still change the answer. What proved an answer stays with the cached root, and is the draft when
    the same is asked again, whoever steps with it. How much is drafted follows from the head's
    calibration, from what steps cost on this machine, which `learn` is told before requests come,
    and from what answers took; where drafting does not pay nothing is drafted.
    """

    def __init__(
        self,
        model: Recommender,
        head: PrefixHead,
        only: DraftPlan | None = None,
        keeps: bool = True,
    ) -> None:
        """only: the plan of every request; None: the best one is chosen. keeps: drafts stay with
        cached roots.
        """
        super().__init__(model)
        self.head, self.only, self.keeps = head, only, keeps
        self.choice = PlanChoice(head.calibration)
        self._asked: WeakKeyDictionary[Sequence, _Asked] = WeakKeyDictionary()
        self._planned: WeakKeyDictionary[Sequence, float] = WeakKeyDictionary()
        on_cpu = self.level_offsets.device.type == "cpu"
        self._now = time.thread_time if on_cpu else time.perf_counter

    def ways(self) -> Ways | None:
        """The strategies whose costs on this machine `learn` takes.

        None where the head was not calibrated: then nothing could be expected from it.
        """
        if self.head.calibration is None:
            return None
        return Ways(
            BeamStrategy(self.model),
            SpeculativeStrategy(self.model, self.head, NOT_CALIBRATED, keeps=False),
            SpeculativeStrategy(self.model, self.head, NOT_CALIBRATED),
        )

    def learn(self, costs: StepCosts) -> None:
        """Use what steps cost on this machine, from now on."""
        self.choice.costs = costs

    def repeats(self, request: RecommendRequest) -> bool:
        """Whether a draft that was kept would be used for this request, as far as is known."""
        if not self.keeps or not is_plain(request):
            return False
        if self.only is not None:
            return self.only.margin > 0
        return self.choice.pays(Group(request.width, request.k, 1, kept=True))

    def tree_room(self, request: RecommendRequest) -> int:
        """The widest plan's nodes at each level but the last, those of all repairs, and all of beam
        search's own.
        """
        sizes = request.trie.level_sizes[1 : request.trie.num_levels]
        margin = self.choice.widest(request.width, request.k)
        if self.only is not None:
            margin = self.only.margin
        drafted = sum(min(math.ceil(margin * request.width), size) for size in sizes)
        repair = sum(min(request.width, size) for size in sizes)
        return drafted + REPAIRS * repair + super().tree_room(request)

    def start(self, sequences: Seq[Sequence]) -> Beams:
        """As beam search; what is recorded searches only where nothing is drafted."""
        if self.recorded is not None:
            margins = self._margins(sequences)
            self._planned.update(zip(sequences, margins, strict=True))
            if any(margins):
                return self.begin(sequences)
        return super().start(sequences)

    def propose(self, state: Beams) -> Draft:
        """At first all that the head thinks likely; in a repair round what is missing."""
        rivals = rerank.rival_keys(state)
        if state.missing is not None:
            keys = state.missing if rivals is None else torch.cat([state.missing, rivals])
            return self._guess(state, keys)
        if state.finished or state.scored.keys.shape[0]:
            return self._draft(state, rivals)
        margins = self._margins(state.sequences)
        if not any(margins):
            return self._draft(state, rivals)
        for sequence, margin in zip(state.sequences, margins, strict=True):
            sequence.timing.drafted = margin > 0
        drafts = self._kept(state.sequences)
        keys = self._drafted(state, drafts, margins)
        keys = keys if rivals is None else torch.cat([keys, rivals])
        return replace(self._guess(state, keys), kept=any(drafts))

    def verify(self, state: Beams, draft: PrefixDraft, slots: Tensor, hidden: Tensor) -> Beams:
        """At first, and after REPAIRS, whatever the scored prefixes prove together; after that
        level by level, as beam search, which needs more where a request was proved already.
        """
        if not draft.guessed:
            return super().verify(state, draft, slots, hidden)
        scored = beam_verify.record(state, draft, slots, hidden)
        scored = replace(rerank.with_rival_scores(scored, self.model), missing=None)
        trims = draft.kept and any(own and not own.trimmed for own in kept(scored.sequences))
        found = beam_verify.search_scored(scored, self.model, trims)
        if found.proven:
            if trims:
                trim(scored, found.needed)
            return found.beams
        if scored.repairs < REPAIRS:
            return replace(scored, missing=found.missing, repairs=scored.repairs + 1)
        return beam_verify.advance(scored, self.model)

    def _guess(self, state: Beams, keys: Tensor) -> PrefixDraft:
        count = len(state.sequences)
        trees = draft_of_keys(state.trie, keys, count, self.level_offsets, state.scored)
        return replace(trees, guessed=True)

    def _kept(self, sequences: Seq[Sequence]) -> list[KeptDraft | None]:
        return kept(sequences) if self.keeps else [None] * len(sequences)

    def _drafted(
        self, state: Beams, drafts: list[KeptDraft | None], margins: list[float]
    ) -> Tensor:
        """Keys (as in Scored): what was kept, and what the head thinks likely of all others."""
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
            NEVER if any_item else max(math.ceil(m * r.k) - 1, 0)
            for m, r, any_item in zip(margins, requests, free, strict=True)
        ]
        return likely_prefixes(state, self.head, widths, places, self.skip_single)

    def finish(self, state: Beams) -> Seq[Result | Again | NotFinite]:
        """Slates; what they took is remembered, where all were asked and drafted for alike. On a
        CPU that is the thread's own time: what other processes take says nothing about drafts.
        """
        asked = {self._asked.pop(sequence, None) for sequence in state.sequences}
        first = asked.pop()
        if first is not None and not asked:
            drafted = state.sequences[0].timing.drafted
            self.choice.took(first.group, drafted, (self._now() - first.began_s) * 1e3)
        if self.keeps:
            keep(state)
        return super().finish(state)

    def _margins(self, sequences: Seq[Sequence]) -> list[float]:
        """Of each request; once for each, since the choice counts its trials."""
        planned = [self._planned.pop(sequence, None) for sequence in sequences]
        known = [margin for margin in planned if margin is not None]
        return known if len(known) == len(sequences) else self._chosen(sequences)

    def _chosen(self, sequences: Seq[Sequence]) -> list[float]:
        if self.only is not None:
            return [self.only.margin] * len(sequences)
        batch, drafts = len(sequences), self._kept(sequences)
        requests = map(request_of, sequences)
        asked = [Group(r.width, r.k, batch, kept=all(drafts)) for r in requests]
        plans = {group: self.choice.plan(group) for group in dict.fromkeys(asked)}
        now = self._now()
        if all(drafts) or not any(drafts):
            for sequence, group in zip(sequences, asked, strict=True):
                self._asked[sequence] = _Asked(group, now)
        return [plans[group].margin for group in asked]
