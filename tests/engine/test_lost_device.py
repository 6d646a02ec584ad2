"""A device that is lost in the middle of work ends the engine, and no request waits forever.

From one operator on, every operator of the pretended device fails, as after an illegal memory
access. The operator is drawn all over the work of a few requests: admission, prefill, search,
verification, results.
"""

from dataclasses import replace

import pytest

from recserve.core.errors import EngineStopped
from recserve.engine.runner import DeviceLost
from tests.support.device_worlds import ranking, recommending, text_engine, text_scores, texts
from tests.support.grids import chosen
from tests.support.pretend_cuda import PretendCuda

POSITIONS = 4
STRATEGIES = ("beam", "speculative", "nezha", "dense", "specgr")


@pytest.fixture
def device(force_kernels):
    force_kernels("torch")
    with PretendCuda() as pretended:
        yield pretended


def run(engine, requests):
    """Submits requests and runs the engine's loop on this thread, until nothing is queued."""
    futures = [engine.submit(request) for request in requests]
    engine._closing = True
    engine._loop()
    engine._closing = False
    return futures


def lose_everywhere(device, engine, requests):
    """Loses the device at operators all over the work, and checks the engine's state each time."""
    for _ in range(2):  # the first run also fills tables of the process
        engine.forget_all()
        before = device.calls
        assert all(future.exception(0) is None for future in run(engine, requests))
        calls = device.calls - before
    assert calls > POSITIONS
    schedulers = engine.schedulers.values()
    # From the last operator, which reads results, to the first one, which is part of an admission.
    for number in reversed([*(calls * n // POSITIONS for n in range(POSITIONS)), calls - 1]):
        engine.forget_all()
        device.lost_at = device.calls + number
        futures = run(engine, requests)
        assert device.lost and isinstance(engine.stopped_by, DeviceLost), (number, calls)
        assert not engine.alive and engine.stats().running == 0
        for future in futures:
            assert future.done(), f"a request waits forever after operator {number} of {calls}"
            error = future.exception(0)
            assert error is None or isinstance(error, EngineStopped), error
        with pytest.raises(EngineStopped):
            engine.submit(requests[0])
        # The same engine, as if a new process had started.
        device.lost_at = engine.stopped_by = None
        for scheduler in schedulers:
            scheduler.lost = None
    engine.forget_all()
    assert all(future.exception(0) is None for future in run(engine, requests))


@pytest.mark.parametrize("strategy", chosen(STRATEGIES, "speculative", "dense"))
def test_a_device_lost_under_item_requests(device, strategy):
    world = recommending("cuda")
    requests = world.ask(strategy)
    if strategy == "specgr":
        requests = [replace(request, index=world.index) for request in requests]
    lose_everywhere(device, world.engine, requests)


@pytest.mark.slow
def test_a_device_lost_under_rankings(device):
    world = ranking("cuda")
    lose_everywhere(device, world.engine, world.ask())


@pytest.mark.parametrize(
    "drafter, parameters",
    [
        pytest.param("none", "everything", marks=pytest.mark.slow),
        pytest.param("ngram", "greedy", marks=pytest.mark.slow),
        ("medusa", "greedy"),
    ],
)
def test_a_device_lost_under_texts(device, drafter, parameters):
    engine = text_engine("cuda", [drafter] if drafter != "none" else [])
    requests = [*texts(drafter, "sample", parameters, most=6), text_scores("cuda")]
    lose_everywhere(device, engine, requests)
