"""Full beam search, its prefixes drafted ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recserve.core.beams import Beams
from recserve.core.bounds import NEVER
from recserve.core.drafting import Draft
from recserve.core.request import RecommendRequest
from recserve.draft import beam as beam_draft
from recserve.draft.nezha import likely_prefixes
from recserve.draft.prefixes import PrefixDraft, draft_of_keys
from recserve.engine.costs import ROOT, Cost, forward_cost, head_cost, measured, scratch_runner
from recserve.engine.runner import Piece
from recserve.engine.strategies.beam import BeamStrategy
from recserve.kernels.host import on_device
from recserve.models.drafters.calibration import DraftPlan
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.verify import beam as beam_verify
from recserve.verify import rerank

NOT_CALIBRATED = DraftPlan(2.0, 0.0, 0.0, 1.0)
CLEARLY = 0.9  # costs are estimates: drafting must be expected to save a tenth


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a forward by its nodes, of the head by its states, and of what surrounds
    them: draft_ms in a draft, round_ms in a round.
    """

    forward: Cost
    head: Cost
    draft_ms: float
    round_ms: float

    def expected_ms(self, plan: DraftPlan, batch: int) -> float:
        """Of a plan for each of `batch` requests that step together."""
        if not plan.margin:
            rounds = 1 + plan.repairs
            return rounds * (self.forward(batch * plan.nodes / rounds) + self.round_ms)
        missed = 1 - plan.proved
        again = 0.0
        if missed > 0:
            # One request that lacks a prefix makes all of them wait for its round.
            rounds = (1 - plan.proved**batch) * plan.repairs / missed
            again = rounds * (self.forward(batch) + self.round_ms)
        first = self.forward(batch * plan.nodes) + self.round_ms
        return self.draft_ms + self.head(batch * plan.nodes) + first + again


class SpeculativeStrategy(BeamStrategy):
    """Full beam search, its prefixes drafted ahead by the self-draft head.

    One forward scores the drafted tree; the verifier is that of `beam`, so the answer is the same
    and only the number of rounds differs. The draft leaves out what lies below the score that the
    k-th item is thought to reach. What it missed is scored in further rounds, as far as it could
    still change the answer. How much is drafted follows from the head's
    calibration and the costs of this machine, measured at the first requests; where drafting does
    not pay nothing is drafted.
    """

    def __init__(self, model: Recommender, head: SelfDraftHead) -> None:
        super().__init__(model)
        self.head = head
        self.costs: dict[tuple[int, int], StepCosts] = {}
        self.only: DraftPlan | None = None  # the plan of every request, while it is calibrated

    def tree_room(self, request: RecommendRequest) -> int:
        """The widest plan's nodes at each level but the last, those of a first repair, and all of
        beam search's own.
        """
        sizes = request.trie.level_sizes[1 : request.trie.num_levels]
        margin = max(plan.margin for plan in self._plans(request.width, request.k))
        drafted = sum(min(math.ceil(margin * request.width), size) for size in sizes)
        repair = sum(min(request.width, size) for size in sizes)
        return drafted + repair + super().tree_room(request)

    def propose(self, state: Beams) -> Draft:
        """At first all that the head thinks likely; in a repair round what is missing."""
        rivals = rerank.rival_keys(state)
        if state.missing is not None:
            keys = state.missing if rivals is None else torch.cat([state.missing, rivals])
            return self._guess(state, keys)
        if state.finished or state.scored.keys.shape[0]:
            return self._draft(state, rivals)
        margins = [self._chosen(state, request).margin for request in state.requests]
        if not any(margins):
            return self._draft(state, rivals)
        likely = self._likely(state, margins)
        keys = likely if rivals is None else torch.cat([likely, rivals])
        return self._guess(state, keys)

    def verify(self, state: Beams, draft: PrefixDraft, slots: Tensor, hidden: Tensor) -> Beams:
        """At first, and after one repair, whatever the scored prefixes prove together; after that
        level by level, as beam search.
        """
        if not draft.guessed:
            return super().verify(state, draft, slots, hidden)
        missing = state.missing
        scored = beam_verify.record(state, draft, slots, hidden)
        scored = replace(rerank.with_rival_scores(scored, self.model), missing=None)
        found = beam_verify.search_scored(scored, self.model)
        if found.proven:
            return found.beams
        if missing is None:
            return replace(scored, missing=found.missing)
        return beam_verify.advance(scored, self.model)

    def _guess(self, state: Beams, keys: Tensor) -> Draft:
        count = len(state.sequences)
        trees = draft_of_keys(state.trie, keys, count, self.level_offsets, state.scored)
        return replace(trees, guessed=True)

    def _likely(self, state: Beams, margins: list[float]) -> Tensor:
        requests = state.requests
        widths = [math.ceil(m * r.width) for m, r in zip(margins, requests, strict=True)]
        places = [
            NEVER if r.caps or r.dense_weight or not self.skip_single else math.ceil(m * r.k) - 1
            for m, r in zip(margins, requests, strict=True)
        ]
        at = on_device(places, state.nodes.device).clamp(min=0)[:, None]
        return likely_prefixes(state, self.head, widths, at, self.skip_single)

    def _plans(self, width: int, k: int) -> list[DraftPlan]:
        if self.only is not None:
            return [self.only]
        if self.head.calibration is None:
            return [NOT_CALIBRATED]
        return self.head.calibration.scaled(width, k)

    def _chosen(self, state: Beams, request: RecommendRequest) -> DraftPlan:
        """The plan that is expected to end soonest; to draft at all must be clearly worth it."""
        plans = self._plans(request.width, request.k)
        if len(plans) == 1:
            return plans[0]
        costs, batch = self._costs(state, request.width), len(state.sequences)
        return min(
            plans,
            key=lambda plan: costs.expected_ms(plan, batch) * (1 if plan.margin else CLEARLY),
        )

    def _costs(self, state: Beams, width: int) -> StepCosts:
        """Measured once for each doubling of the batch and of the beam width."""
        key = len(state.sequences).bit_length(), width.bit_length()
        if key not in self.costs:
            self.costs[key] = self._measure(state, width)
        return self.costs[key]

    def _measure(self, state: Beams, width: int) -> StepCosts:
        device = state.tails.device

        def draft(_: int) -> None:
            self._likely(state, [2.0] * len(state.sequences))

        tree = beam_draft.propose(state, self.level_offsets, self.skip_single)
        nodes = tree.tree.num_nodes
        runner = scratch_runner(self.model, nodes)
        slots = ROOT + torch.arange(nodes, device=device)
        roots = (torch.arange(ROOT, device=device),) * len(state.sequences)

        def beam_round(_: int) -> None:
            again = beam_draft.propose(state, self.level_offsets, self.skip_single)
            piece = Piece(again.tree, again.inputs, again.queries, slots, roots)
            self.verify(state, again, slots, runner.forward([piece])[0])

        known = next(iter(self.costs.values()), None)
        forward = known.forward if known else forward_cost(self.model)
        head = known.head if known else head_cost(self.head)
        whole = measured(beam_round, (1,), device)(1)
        return StepCosts(
            forward,
            head,
            measured(draft, (1,), device)(1),
            max(whole - forward(len(tree.inputs)), 0.0),
        )
