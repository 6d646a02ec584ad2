"""What it costs on this machine to decode items, by beam search and with drafts: whole answers are
made before requests come, for histories that are drawn.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from recserve.core.drafting import Strategy
from recserve.core.request import RecommendRequest, Root, Slate
from recserve.engine.costs import Cost, forward_cost, measured, scratch_runner
from recserve.engine.lane import Lane
from recserve.kernels.trie_overlay import AnyTrie
from recserve.models.drafters.calibration import DraftPlan
from recserve.models.inputs import NodeInputs
from recserve.models.recommender import Recommender

BEAMS = (10, 50, 200, 800)  # of all requests that step together
WIDEST = 200
HISTORY = 16  # items
MARGIN = 2.0
ROUNDS = 16  # more are not expected
SEARCH_S = 0.6


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a forward by its nodes; and by the beams of all requests, what comes with it:
    in a round of beam search, in the first of a draft with MARGIN, and in one whose draft was kept
    from an earlier visit, which is what a repair takes too.
    """

    forward: Cost
    round: Cost
    drafted: Cost
    kept: Cost

    def expected_ms(self, plan: DraftPlan, width: int, batch: int, kept: bool = False) -> float:
        """Of a plan for each of `batch` requests that step together and keep `width` beams. kept:
        their drafts were, and need one round.
        """
        again, beams = further_rounds(plan, batch), batch * width
        if not plan.margin:
            return (1 + again) * (
                self.forward(batch * plan.nodes / (1 + again)) + self.round(beams)
            )
        if kept:
            return self.forward(batch * plan.nodes) + self.kept(beams)
        first = self.forward(batch * plan.nodes) + self.drafted(plan.margin / MARGIN * beams)
        return first + again * (self.forward(batch) + self.kept(beams))


def further_rounds(plan: DraftPlan, batch: int) -> float:
    """Expected rounds after the first until the last of `batch` requests is answered: each of them
    needs one with the chance `1 - proved`, and after each another one with a chance such that it
    needs `repairs` on average.
    """
    missed = 1 - plan.proved
    if not missed or not plan.repairs:
        return 0.0
    another = max(1 - missed / plan.repairs, 0.0)
    chances = missed * another ** np.arange(ROUNDS)
    return float((1 - (1 - chances) ** batch).sum())


@dataclass(frozen=True)
class Ways:
    """Beam search; with drafts of MARGIN that are made each time; and with such that are kept."""

    beam: Strategy
    drafted: Strategy
    kept: Strategy


@torch.inference_mode()
def step_costs(model: Recommender, ways: Ways, trie: AnyTrie) -> StepCosts:
    """Measure, a few seconds. trie: of the catalogue that is served, or one like it."""
    forward = forward_cost(model)
    asked = {beams: _requests(model, trie, beams) for beams in BEAMS}
    roots = sum(len(r.root.keys) for requests in asked.values() for r in requests)
    trees = sum(ways.kept.tree_room(request) for request in asked[BEAMS[-1]])
    lane = Lane(scratch_runner(model, roots + trees))

    def around(strategy: Strategy, before: Cost | None) -> Cost:
        """What is left of an answer without its forwards, per round; or, where it is known what
        comes `before` with every round but the first, with the first.
        """
        made: dict[int, list[Slate]] = {}

        def answer(beams: int) -> None:
            made[beams] = _answers(lane, strategy, asked[beams])

        whole = measured(answer, BEAMS, trie.device, SEARCH_S)
        left = []
        for beams, milliseconds in zip(whole.sizes, whole.milliseconds, strict=True):
            rounds = max(slate.timing.forwards for slate in made[beams])
            nodes = sum(slate.timing.nodes for slate in made[beams])
            rest = milliseconds - rounds * forward(nodes / rounds)
            rest = rest / rounds if before is None else rest - (rounds - 1) * before(beams)
            left.append(max(rest, 0.0))
        return Cost(whole.sizes, tuple(left))

    kept = around(ways.kept, None)
    return StepCosts(forward, around(ways.beam, None), around(ways.drafted, kept), kept)


def _requests(model: Recommender, trie: AnyTrie, beams: int) -> list[RecommendRequest]:
    """So many that they keep this number of beams in all."""
    width, rows = min(beams, WIDEST), model.num_bound_items
    generator = torch.Generator().manual_seed(0)
    requests = []
    for _ in range(beams // width):
        items = torch.randint(0, rows, (HISTORY,), generator=generator)
        tokens = model.config.num_code_tokens + items
        if model.config.input == "codes":
            tokens = model.item_tokens.cpu()[items].flatten()
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), tokens])
        root = Root(NodeInputs(tokens.to(trie.device)), tokens.numpy())
        requests.append(RecommendRequest(root, trie, min(width, 10), width))
    return requests


def _answers(lane: Lane, strategy: Strategy, requests: list[RecommendRequest]) -> list[Slate]:
    """As the engine steps."""
    for request in requests:
        admitted = lane.admit(request, Future(), time.monotonic(), strategy)
        assert admitted, "the scratch pool is too small"
    slates = []
    while lane.num_running:
        for _, answer in [*lane.begin(), *lane.step()]:
            if isinstance(answer, Exception):
                raise answer
            assert isinstance(answer, Slate)
            slates.append(answer)
    return slates
