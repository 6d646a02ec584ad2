"""A step of items computes a bounded number of tokens, and the results are those of one pass."""

import time
from dataclasses import replace

import numpy as np
import pytest

from recserve.core.errors import DeadlineExceeded
from recserve.core.request import LikelihoodQuery, RankQuery, SlateQuery
from recserve.engine.build import ITEM_TOKENS, EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.search.strategy import Heads
from tests.support.draft_heads import make_head
from tests.support.rankers import make_ranker, ranking_prefix
from tests.support.recommenders import CATALOGUES, draw_prefix, make

SMALL = EngineConfig(kv_bytes=16 * 2**20, page_size=4)
STEP = 16


class Bounded:
    """An engine with a bound of tokens in an item step, and the tokens of each of its passes."""

    def __init__(self, step_tokens: int | None, name: str = "recommender"):
        self.model, self.trie = make(CATALOGUES["ordinary"], "items", "children")
        ranker = make_ranker() if name == "ranker" else None
        heads = Heads(make_head(self.model, "from-target"))
        self.engine = build_engine(EngineModels(self.model, ranker, heads), SMALL)
        self.scheduler = self.engine.schedulers[name]
        self.scheduler.step_tokens = step_tokens
        self.tokens: list[int] = []
        forward = self.scheduler.runner.forward

        def counted(pieces):
            self.tokens.append(sum(len(piece.inputs) for piece in pieces))
            return forward(pieces)

        self.scheduler.runner.forward = counted


def slates(world: Bounded, strategy: str) -> list[SlateQuery]:
    return [
        SlateQuery(
            prefix=draw_prefix(world.model, events, seed),
            trie=world.trie,
            k=5,
            beam_width=20,
            strategy=strategy,
        )
        for seed, events in enumerate((70, 3, 40, 1))
    ]


@pytest.mark.parametrize("strategy", ["beam", "speculative"])
def test_slates_are_those_of_one_pass(strategy):
    whole, parts = Bounded(None), Bounded(STEP)
    expected = whole.engine.run_many(slates(whole, strategy))
    found = parts.engine.run_many(slates(parts, strategy))
    for one, other in zip(found, expected, strict=True):
        assert one.rows.tolist() == other.rows.tolist()
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-5)
    assert max(parts.tokens) == STEP < max(whole.tokens)
    assert sum(parts.tokens) == sum(whole.tokens)


def test_scores_of_many_candidates_are_those_of_one_pass():
    found = []
    for step_tokens in (None, STEP):
        world = Bounded(step_tokens)
        rows = np.arange(world.model.num_bound_items)
        request = LikelihoodQuery(draw_prefix(world.model, 9, 0), world.trie, rows)
        found.append(world.engine.run(request).values)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert max(world.tokens) == STEP and len(world.tokens) > 5


def test_the_tokens_of_a_prefix_that_see_each_other_stay_together():
    found = []
    for step_tokens in (None, STEP):
        world = Bounded(step_tokens, "ranker")
        prefix = ranking_prefix(20, 30, 10, seed=0)
        candidates = prefix.inputs.select(slice(0, 40))
        found.append(world.engine.run(RankQuery(prefix, candidates)).values)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert prefix.shared > STEP and max(world.tokens) == prefix.shared


def test_an_unloaded_request_has_the_passes_of_an_engine_without_a_bound():
    found = []
    for bounded in (False, True):
        world = Bounded(ITEM_TOKENS["cpu"] if bounded else None)
        for request in slates(world, "speculative"):
            world.engine.run(request)
        found.append(world.tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_late_request_leaves_between_two_parts_of_its_prefix(cancelled):
    world = Bounded(STEP)
    deadline_s = None if cancelled else time.monotonic() + 60
    request = replace(slates(world, "beam")[0], deadline_s=deadline_s)
    future = world.engine.submit(request)
    world.engine.step()
    assert world.tokens == [STEP] and not future.done()
    if cancelled:
        future.cancel()
    else:
        (sequence,) = world.scheduler.cold
        sequence.request = replace(request, deadline_s=time.monotonic() - 1)
    while world.engine.step():
        pass
    assert world.tokens == [STEP]
    assert future.cancelled() or isinstance(future.exception(), DeadlineExceeded)
    assert world.scheduler.kv.allocator.num_free == world.scheduler.kv.allocator.num_pages


def test_others_are_served_between_two_parts_of_a_prefix():
    world = Bounded(STEP)
    large, small = slates(world, "beam")[0], slates(world, "beam")[3]
    world.engine.run(small)  # its prefix is cached
    first = world.engine.submit(large)
    world.engine.step()
    second = world.engine.submit(small)
    while not second.done():
        world.engine.step()
    assert not first.done()
    while world.engine.step():
        pass
    assert first.done()
