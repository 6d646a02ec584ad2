"""Every strategy on a pretended CUDA device: the CPU's answers, no mixing of devices."""

import pytest

from tests.support.device_worlds import assert_same, ranking, recommending
from tests.support.grids import covering, thin
from tests.support.pretend_cuda import PretendCuda

RECOMMEND = ("beam", "speculative", "nezha", "rpg", "dense", "likelihood")
HOW = {
    "items": ("plain", "filters", "diversity", "weighed", "live"),
    "codes": ("plain", "filters", "live"),
}


@pytest.fixture(autouse=True)
def plain_kernels(force_kernels):
    force_kernels("torch")


@pytest.mark.parametrize("strategy,form", thin(covering((*RECOMMEND, "warm"), tuple(HOW)), 2))
def test_recommendations_are_the_cpu_s(strategy, form):
    """Cold and warm, in every way of asking."""
    here = recommending("cpu", form)
    queries = [variant for variant in HOW[form] for _ in range(2)]
    expected = [here.engine.run_many(here.ask(strategy, variant)) for variant in queries]
    with PretendCuda():
        there = recommending("cuda", form)
        for variant, slates in zip(queries, expected, strict=True):
            assert_same(there.engine.run_many(there.ask(strategy, variant)), slates)


def test_level_likelihoods_are_the_cpu_s():
    here = recommending("cpu", autoregressive=False)
    expected = here.engine.run_many(here.ask("likelihood"))
    with PretendCuda():
        there = recommending("cuda", autoregressive=False)
        assert_same(there.engine.run_many(there.ask("likelihood")), expected)


def test_rankings_are_the_cpu_s():
    here = ranking("cpu")
    expected = here.engine.run_many(here.ask())
    with PretendCuda():
        there = ranking("cuda")
        for _ in range(2):
            assert_same(there.engine.run_many(there.ask()), expected)
