"""How often the host waits for the device in a request, counted on a pretended one.

A bound that fails has a table of what waited and where; raise it only for a look that cannot be
avoided. The engine is warmed first: what is read once for a catalogue version is not counted.
"""

import pytest
import torch

from tests.support.device_worlds import ranking, recommending
from tests.support.grids import covering, thin
from tests.support.host_waits import RANK, WAITS, assert_waits
from tests.support.pretend_cuda import PretendCuda
from tests.support.recorded_searches import SOME, with_searches

# Recorded, a search asks nothing: what is left are a slate's rows and scores.
RECORDED = {"read": 2}


@pytest.fixture(autouse=True)
def plain_kernels(force_kernels):
    force_kernels("torch")


@pytest.mark.parametrize(
    "strategy,variant", thin(covering(tuple(WAITS), ("plain", "filters", "live")), 2)
)
def test_recommendations(strategy, variant):
    """The same for one request and for several, with and without filters and new items."""
    with PretendCuda() as device:
        world = recommending("cuda")
        assert_waits(device, world.engine, world.ask(strategy, variant), WAITS[strategy])


@pytest.mark.parametrize(
    "strategy,variant", thin(covering(("beam", "nezha"), ("plain", "filters", "live")), 2)
)
def test_recorded_searches(strategy, variant):
    with PretendCuda() as device:
        world = recommending("cuda")
        trie = world.live if variant == "live" else world.trie
        with torch.inference_mode():
            graphs = with_searches(world, trie, lambda step: step, SOME)
        requests = world.ask(strategy, variant)
        assert_waits(device, world.engine, requests, RECORDED)
        assert graphs.counts == {"replayed": 3, "size": 0, "version": 0}


def test_rankings():
    with PretendCuda() as device:
        world = ranking("cuda")
        assert_waits(device, world.engine, world.ask(), RANK)
