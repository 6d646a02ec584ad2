"""Measures what it costs to decode items on this machine, for histories that are drawn.

Whole answers are made before requests come, so that no request measures anything.
"""

from __future__ import annotations

import time
from concurrent.futures import Future

import torch

from recserve.core.cost import Cost, measured
from recserve.core.drafting import Strategy
from recserve.core.request import RecommendRequest, Root, Slate
from recserve.engine.items.lane import Lane
from recserve.engine.runtime.costs import forward_cost, scratch_runner
from recserve.kernels.trie.trie_view import TrieView
from recserve.models.inputs import NodeInputs
from recserve.models.recommender import Recommender
from recserve.search.step_costs import StepCosts, Ways
from recserve.search.strategies.speculative import SpeculativeStrategy

BEAMS = (10, 50, 200, 800)  # of all requests that step together
WIDEST = 200
HISTORY = 16  # items
SEARCH_S = 0.6


def learn_costs(strategy: SpeculativeStrategy, trie: TrieView) -> None:
    """Measure for a strategy what its steps cost, where it can make use of that."""
    ways = strategy.ways()
    if ways is not None:
        strategy.learn(step_costs(strategy.model, ways, trie))


@torch.inference_mode()
def step_costs(model: Recommender, ways: Ways, trie: TrieView) -> StepCosts:
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


def _requests(model: Recommender, trie: TrieView, beams: int) -> list[RecommendRequest]:
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
