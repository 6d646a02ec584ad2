"""On a pretended CUDA device, every drafter and every rule writes the texts of the CPU.

Launched steps upload without waiting: a blocking copy waits for the forward pass before it.
"""

import pytest

from tests.support.device_worlds import (
    TEXT_PARAMETERS,
    assert_same,
    text_engine,
    text_scores,
    texts,
)
from tests.support.grids import sampled
from tests.support.pretend_cuda import PretendCuda

DRAFTERS = (
    "none", "ngram", "suffix", "lookahead", "draft_model", "specinfer", "medusa", "merged",
    "specformer",
)  # fmt: skip


@pytest.fixture(autouse=True)
def plain_kernels(force_kernels):
    force_kernels("torch")


def both(names, requests, pages=200):
    here = text_engine("cpu", names, pages)
    expected = [here.run_many(requests) for _ in range(2)]
    with PretendCuda() as device:
        there = text_engine("cuda", names, pages)
        for answers in expected:  # the second ones find their prompts in the cache
            device.syncs.clear()
            assert_same(there.run_many(requests), answers)
        uploads, table = device.counts()["upload"], device.table()
    assert uploads == 0, table  # the first run makes constants of the drafter


# Greedy texts upload least, so the others draw.
SHOWN = ("none-everything",)


@pytest.mark.parametrize(
    "drafter,parameters",
    sampled(DRAFTERS, tuple(TEXT_PARAMETERS), default=SHOWN),
)
def test_texts_are_the_cpu_s(drafter, parameters):
    names = () if drafter == "none" else (drafter,)
    both(names, texts(drafter, "sample", parameters))


@pytest.mark.parametrize(
    "drafter,rule",
    [
        ("draft_model", "rejection"),
        *(
            pytest.param(drafter, rule, marks=pytest.mark.slow)
            for drafter, rule in (
                ("ngram", "block"),
                ("specinfer", "multi_step"),
                ("draft_model", "block"),
                ("draft_model", "typical"),
                ("ngram", "rejection"),
                ("ngram", "typical"),
                ("specinfer", "typical"),
            )
        ),
    ],
)
def test_rules_decide_as_on_the_cpu(drafter, rule):
    both((drafter,), texts(drafter, rule, "truncated"))


@pytest.mark.slow
def test_preempted_texts_resume():
    both(("suffix",), texts("suffix", "sample", "hot", count=5), pages=14)


def test_label_scores_are_the_cpu_s():
    expected = text_engine("cpu").run_many([text_scores("cpu")] * 2)
    with PretendCuda():
        assert_same(text_engine("cuda").run_many([text_scores("cuda")] * 2), expected)
