"""Stage times of slates: where every operator of the device takes a millisecond, and nothing else
takes any time, the stages add up to the whole.
"""

import time
from dataclasses import replace

import pytest
import torch

from recserve.engine.beam_search_graph import SearchShape
from tests.support.device_worlds import recommending
from tests.support.grids import covering, thin
from tests.support.pretend_cuda import PretendCuda
from tests.support.recorded_searches import SOME, assert_same, with_searches

STRATEGIES = ("beam", "speculative", "nezha", "rpg", "dense", "specgr")


@pytest.fixture
def device(force_kernels, monkeypatch):
    """A pretended device whose operators are the clock."""
    force_kernels("torch")
    with PretendCuda() as device:
        for clock in ("monotonic", "perf_counter"):
            monkeypatch.setattr(time, clock, lambda: device.calls / 1e3)
        yield device


def stages_of(world, requests):
    """Yields the times of one request after another, whose stages add up."""
    for request in requests:
        timing = world.engine.run(request).timing
        stages = timing.queue_ms, timing.prefill_ms, timing.draft_ms, timing.verify_ms
        assert sum(stages) == pytest.approx(timing.total_ms, abs=1e-6), timing
        yield timing


@pytest.mark.parametrize(
    "strategy,variant", thin(covering(STRATEGIES, ("plain", "filters", "diversity", "live")), 3)
)
def test_launched(strategy, variant, device):
    """From an empty cache, and again with the history in it."""
    world = recommending("cuda")
    requests = world.ask(strategy, variant)
    if strategy == "specgr":
        requests = [replace(request, index=world.index) for request in requests]
    times = list(stages_of(world, requests * 2))
    assert len(times) == 4
    proposes = strategy in ("beam", "speculative", "specgr")
    assert all((timing.draft_ms > 0) == proposes for timing in times), times


@pytest.mark.parametrize(
    "strategy,variant",
    thin(covering(("beam", "nezha"), ("plain", "filters", "diversity", "weighed")), 3),
)
def test_replayed(strategy, variant, device):
    world = recommending("cuda")
    with torch.inference_mode():
        graphs = with_searches(world, world.trie, lambda step: step, SOME)
    requests = world.ask(strategy, variant)
    times = list(stages_of(world, requests * 2))
    assert all(timing.verify_ms > 0 == timing.draft_ms for timing in times), times
    assert graphs.counts["replayed"] >= 4 and not graphs.counts["size"]


@pytest.mark.parametrize("strategy", ["beam", "nezha"])
def test_what_no_graph_holds_is_launched(strategy, device):
    """In the pass of its first round, with the answers and the counters of a launched search."""
    launching, world = recommending("cuda"), recommending("cuda")
    with torch.inference_mode():
        graphs = with_searches(world, world.trie, lambda step: step, (SearchShape(1, 1),))
    requests = world.ask(strategy, "plain")
    times = list(stages_of(world, requests * 2))
    assert all((timing.draft_ms > 0) == (strategy == "beam") for timing in times), times
    assert graphs.counts == {"replayed": 0, "size": len(times), "version": 0}
    wanted = launching.engine.run_many(launching.ask(strategy, "plain"))
    assert_same(wanted, world.engine.run_many(requests))
