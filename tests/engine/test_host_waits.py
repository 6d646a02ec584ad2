"""How often the host waits for the device in a request, counted on a pretended one.

A bound that fails has a table of what waited and where; raise it only for a look that cannot be
avoided. The engine is warmed first: what is read once for a catalogue version is not counted.
"""

import pytest
import torch
from device_worlds import ranking, recommending

from recserve.kernels import dispatch
from tests.engine.test_recorded_searches import with_searches
from tests.support.pretend_cuda import PretendCuda

# Three levels. `beam` takes two rounds; each looks at the device to size its tree (twice, and once
# more where some of it was scored before), to place its nodes and to learn how far the scores go,
# and the round that goes on to the leaves twice more. `speculative` looks at what it drafts, and at
# what its draft has left out; when the same is asked the second time, also at what of the kept
# draft was needed, and beside one that is drafted for, as those with a filter always are, at both.
# All read a slate twice: its rows and its scores. `read` and `shape` as in pretend_cuda.py.
WAITS = {
    "beam": {"read": 8, "shape": 7},
    "speculative": {"read": 8, "shape": 5},
    "nezha": {"read": 2},
    "parallel": {"read": 2},
    "dense": {"read": 1},
    "likelihood": {"read": 2, "shape": 4},
    "warm": {},
}
RANK = {"read": 2}
# Recorded, a search asks nothing: what is left are a slate's rows and scores.
RECORDED = {"read": 2}


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", "torch")


def assert_waits(device, engine, requests, bounds):
    """Cold, then with the root in the prefix cache."""
    engine.run_many(requests)
    for cached in (False, True):
        if not cached:
            engine.forget_all()
        device.syncs.clear()
        engine.run_many(requests)
        counts = device.counts()
        for kind in ("read", "shape", "upload"):
            assert counts[kind] <= bounds.get(kind, 0), (
                f"{kind}, cached: {cached}\n" + device.table()
            )


@pytest.mark.parametrize("how", ["plain", "filters", "live"])
@pytest.mark.parametrize("strategy", WAITS)
def test_recommendations(strategy, how):
    """The same for one request and for several, with and without filters and new items."""
    with PretendCuda() as device:
        world = recommending("cuda")
        assert_waits(device, world.engine, world.ask(strategy, how), WAITS[strategy])


@pytest.mark.parametrize("how", ["plain", "filters", "live"])
@pytest.mark.parametrize("strategy", ["beam", "nezha"])
def test_recorded_searches(strategy, how):
    with PretendCuda() as device:
        world = recommending("cuda")
        trie = world.live if how == "live" else world.trie
        with torch.inference_mode():
            graphs = with_searches(world, trie, lambda step: step)
        requests = world.ask(strategy, how)
        assert_waits(device, world.engine, requests, RECORDED)
        assert graphs.counts == {"replayed": 3, "size": 0, "version": 0}


def test_rankings():
    with PretendCuda() as device:
        world = ranking("cuda")
        assert_waits(device, world.engine, world.ask(), RANK)
