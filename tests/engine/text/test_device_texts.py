"""On a pretended CUDA device, every drafter and every rule writes the texts of the CPU."""

import pytest

from recserve.kernels import backend
from tests.support.device_worlds import (
    TEXT_PARAMETERS,
    assert_same,
    text_engine,
    text_scores,
    texts,
)
from tests.support.grids import covering
from tests.support.pretend_cuda import PretendCuda

DRAFTERS = (
    "none", "ngram", "suffix", "lookahead", "draft_model", "specinfer", "medusa", "merged",
    "specformer",
)  # fmt: skip


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    monkeypatch.setattr(backend, "FORCED", "torch")


def both(names, requests, pages=200):
    here = text_engine("cpu", names, pages)
    turns = (requests, requests[:1])  # the second finds its prompt in the cache
    expected = [here.run_many(turn) for turn in turns]
    with PretendCuda():
        there = text_engine("cuda", names, pages)
        for turn, answers in zip(turns, expected, strict=True):
            assert_same(there.run_many(turn), answers)


@pytest.mark.parametrize("drafter,parameters", covering(DRAFTERS, tuple(TEXT_PARAMETERS)))
def test_texts_are_the_cpu_s(drafter, parameters):
    names = () if drafter == "none" else (drafter,)
    both(names, texts(drafter, "sample", parameters))


@pytest.mark.parametrize(
    "drafter,rule",
    [
        *covering(("draft_model", "ngram"), ("rejection", "block", "typical")),
        ("specinfer", "multi_step"),
        pytest.param("specinfer", "typical", marks=pytest.mark.slow),
    ],
)
def test_rules_decide_as_on_the_cpu(drafter, rule):
    both((drafter,), texts(drafter, rule, "hot"))


def test_preempted_texts_resume():
    both(("suffix",), texts("suffix", "sample", "hot", count=5), pages=14)


def test_label_scores_are_the_cpu_s():
    expected = text_engine("cpu").run_many([text_scores("cpu")] * 2)
    with PretendCuda():
        assert_same(text_engine("cuda").run_many([text_scores("cuda")] * 2), expected)


@pytest.mark.parametrize(
    "drafter,rule,parameters",
    [
        *((drafter, "sample", "hot") for drafter in DRAFTERS),
        ("none", "sample", "everything"),
        ("draft_model", "rejection", "truncated"),
        ("medusa", "sample", "greedy"),
    ],
)
def test_launched_steps_upload_without_waiting(drafter, rule, parameters):
    """A blocking copy waits for the forward pass before it."""
    with PretendCuda() as device:
        engine = text_engine("cuda", () if drafter == "none" else (drafter,))
        for _ in range(2):
            engine.run_many(texts(drafter, rule, parameters))
            found = device.counts()["upload"], device.table()
            device.syncs.clear()
        assert found[0] == 0, found[1]  # the first run makes constants of the drafter
