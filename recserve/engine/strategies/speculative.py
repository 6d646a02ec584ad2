"""Full beam search, its prefixes drafted ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from recserve.core.beams import Beams
from recserve.core.drafting import Draft
from recserve.core.request import RecommendRequest
from recserve.draft import beam as beam_draft
from recserve.draft.nezha import likely_prefixes
from recserve.engine.costs import ROOT, Cost, forward_cost, head_cost, measured, scratch_runner
from recserve.engine.runner import Piece
from recserve.engine.strategies.beam import BeamStrategy
from recserve.models.drafters.calibration import DraftPlan
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.verify import rerank

SPREAD = 4.0  # of a head that was not calibrated
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
        if not plan.spreads:
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
    and only the number of rounds differs. What the draft missed is scored in further rounds. How
    much is drafted follows from the head's calibration and the costs of this machine, measured at
    the first requests; where drafting does not pay nothing is drafted.
    """

    def __init__(self, model: Recommender, head: SelfDraftHead) -> None:
        super().__init__(model)
        self.head = head
        self.costs: dict[tuple[int, int], StepCosts] = {}

    def tree_room(self, request: RecommendRequest) -> int:
        """The widest plan's nodes at each level but the last, and all of beam search's own."""
        sizes = request.trie.level_sizes[: request.trie.num_levels]
        width = request.width
        drafted = [
            sum(min(n, size) for n, size in zip(kept_prefixes(plan, width), sizes, strict=True))
            for plan in self._plans(width)
            if plan.spreads
        ]
        first = min(width, sizes[1]) if len(sizes) > 1 else 0
        return first + max(drafted, default=0) + super().tree_room(request)

    def propose(self, state: Beams) -> Draft:
        """At first all that the head thinks likely; in a repair round what is missing."""
        rivals = rerank.rival_keys(state)
        if state.finished or state.scored.keys.shape[0]:
            return self._draft(state, rivals)
        widths = state.widths
        plans = [self._chosen(state, width) for width in widths]
        if not any(plan.spreads for plan in plans):
            return self._draft(state, rivals)
        levels = self.model.config.num_levels
        kept = [
            kept_prefixes(plan, width) if plan.spreads else [0] * levels
            for plan, width in zip(plans, widths, strict=True)
        ]
        by_level = [list(level) for level in zip(*kept, strict=True)]
        likely = likely_prefixes(state, self.head, by_level, self.skip_single)
        return self._draft(state, likely if rivals is None else torch.cat([likely, rivals]))

    def _plans(self, width: int) -> list[DraftPlan]:
        if self.head.calibration is None:
            spreads = (0.0, 0.0, *[SPREAD] * (self.model.config.num_levels - 2))
            return [DraftPlan(spreads[: self.model.config.num_levels], 0.0, 0.0, 1.0)]
        return self.head.calibration.scaled(width)

    def _chosen(self, state: Beams, width: int) -> DraftPlan:
        """The plan that is expected to end soonest; to draft at all must be clearly worth it."""
        plans = self._plans(width)
        if len(plans) == 1:
            return plans[0]
        costs, batch = self._costs(state, width), len(state.sequences)
        return min(
            plans,
            key=lambda plan: costs.expected_ms(plan, batch) * (1 if plan.spreads else CLEARLY),
        )

    def _costs(self, state: Beams, width: int) -> StepCosts:
        """Measured once for each doubling of the batch and of the beam width."""
        key = len(state.sequences).bit_length(), width.bit_length()
        if key not in self.costs:
            self.costs[key] = self._measure(state, width)
        return self.costs[key]

    def _measure(self, state: Beams, width: int) -> StepCosts:
        device = state.tails.device
        by_level = [[2 * width] * len(state.sequences)] * self.model.config.num_levels

        def draft(_: int) -> None:
            likely_prefixes(state, self.head, by_level, self.skip_single)

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


def kept_prefixes(plan: DraftPlan, width: int) -> list[int]:
    """Prefixes of each length 0 to L - 1 that a draft keeps for a beam width."""
    return [math.ceil(spread * width) for spread in plan.spreads]
