"""Engines with captured searches, over a pool filled with poison values."""

import numpy as np

from recserve.engine.beam_search_graph import BeamSearchGraphs, SearchLimits, SearchShape
from tests.support import recorder
from tests.support.recorded_steps import POISON

SHAPES = tuple(
    SearchShape(requests, width, excluded, weighed)
    for weighed in (False, True)
    for excluded in (24, None)
    for requests, width in ((1, 8), (4, 16))
)
# Both sizes, and the large one with a bitmap and with weights.
SOME = (SHAPES[0], SHAPES[1], SHAPES[3], SHAPES[5])


def with_searches(world, trie, record=recorder.record, shapes=SHAPES, **limits):
    """Captures searches of the world's engine, over a pool filled with poison values."""
    engine = world.engine
    scheduler, head = engine.schedulers["recommender"], engine._strategies["nezha"].head
    runner, capturing = scheduler.runner, recorder.CpuRecorder(record)
    bounds = SearchLimits(shapes, **{"capacity": 40, "seconds": float("inf"), **limits})
    graphs = BeamSearchGraphs(runner, scheduler.kv, world.model, head, bounds, capturing)
    runner.pool.keys.fill_(POISON)
    runner.pool.values.fill_(POISON)
    scheduler.searches = graphs
    engine.capture(trie)
    return graphs


def assert_same(wanted, got, close=1e-5):
    """Asserts equal rows and flags, and scores within the tolerance."""
    for one, other in zip(wanted, got, strict=True):
        assert one.rows.tolist() == other.rows.tolist()
        np.testing.assert_allclose(one.scores, other.scores, rtol=close, atol=close)
        assert one.exact == other.exact
