"""The engine on a pretended CUDA device with its kernels in Triton, interpreted: the CPU's answers.

What a GPU would run, but for the machine code: which kernels are launched, with what, and that
nothing around them waits.
"""

import pytest

from recserve.kernels import backend
from tests.support import triton_interpreter
from tests.support.device_worlds import assert_same, ranking, recommending, text_engine, texts
from tests.support.host_waits import RANK, WAITS, assert_waits
from tests.support.pretend_cuda import PretendCuda

FORWARD = {"rope_kernel", "_attend", "add_norm_kernel", "gate_kernel"}


@pytest.fixture
def launches(monkeypatch, force_kernels):
    """Kernels launched, by name."""
    force_kernels("triton")
    return triton_interpreter.interpret_pretended(monkeypatch)


SEARCH = {*FORWARD, "children_kernel"}
CASES = [
    pytest.param("beam", "plain", "items", SEARCH, marks=pytest.mark.slow),
    ("beam", "filters", "codes", SEARCH),
    pytest.param("beam", "live", "items", SEARCH, marks=pytest.mark.slow),
    pytest.param("speculative", "filters", "items", SEARCH, marks=pytest.mark.slow),
    pytest.param("nezha", "plain", "items", SEARCH, marks=pytest.mark.slow),
    pytest.param("likelihood", "plain", "codes", FORWARD, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("strategy,variant,form,kernels", CASES)
def test_recommendations(strategy, variant, form, kernels, launches):
    here = recommending("cpu", form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "FORCED", "torch")
        expected = here.engine.run_many(here.ask(strategy, variant))
    with PretendCuda() as device:
        there = recommending("cuda", form)
        requests = there.ask(strategy, variant)
        assert_same(there.engine.run_many(requests), expected)
        assert set(launches) == kernels
        if strategy == "nezha":
            assert_waits(device, there.engine, requests, WAITS[strategy])


def test_rankings(launches):
    here = ranking("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "FORCED", "torch")
        expected = here.engine.run_many(here.ask())
    with PretendCuda() as device:
        there = ranking("cuda")
        requests = there.ask()
        assert_same(there.engine.run_many(requests), expected)
        assert set(launches) == {"_attend"}  # its layers have no rotary positions
        assert_waits(device, there.engine, requests, RANK)


@pytest.mark.parametrize(
    "drafter,parameters,kernels",
    [
        pytest.param("none", "hot", FORWARD, marks=pytest.mark.slow),
        ("medusa", "greedy", {*FORWARD, "head_kernel"}),
    ],
)
def test_texts(drafter, parameters, kernels, launches):
    names = () if drafter == "none" else (drafter,)
    requests = texts(drafter, "sample", parameters, count=1, most=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "FORCED", "torch")
        expected = text_engine("cpu", names).run_many(requests)
    with PretendCuda():
        assert_same(text_engine("cuda", names).run_many(requests), expected)
    assert set(launches) >= kernels
