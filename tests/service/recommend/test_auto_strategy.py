"""`auto`: exact while there is time, the head alone where there is not, and back again."""

import time

import pytest

from recserve.batch.together import together
from recserve.schemas.items import RecommendRequest
from recserve.search.strategies.speculative import NO_DRAFT, UNCALIBRATED
from recserve.service import Service
from recserve.service.auto_strategy import StrategyChooser
from tests.support.tiny_bundle import shared_bundle

ALL = ("beam", "dense", "nezha", "rpg", "speculative")


def in_ms(milliseconds: float) -> float:
    return time.monotonic() + milliseconds / 1e3


@pytest.mark.parametrize(
    "there,exact",
    [
        (ALL, "speculative"),
        (("beam", "nezha"), "beam"),
        (("beam", "rpg"), "beam"),
        (("rpg",), "rpg"),
    ],
)
def test_without_hurry_it_is_the_exact_one(there, exact):
    chooser = StrategyChooser(there)
    assert chooser.choose(50, None)[0] == exact
    assert chooser.choose(50, in_ms(1))[0] == exact  # nothing is known yet
    assert not chooser.choose(50, in_ms(1))[1]


def test_a_deadline_that_exact_answers_miss_takes_the_quick_one():
    chooser = StrategyChooser(ALL)
    for _ in range(3):
        chooser.record("speculative", 50, 0.4)
    assert chooser.choose(50, in_ms(5000))[0] == "speculative"
    hurried = chooser.choose(50, in_ms(100))
    assert hurried == ("nezha", True)
    assert chooser.choose(2, in_ms(100))[0] == "speculative"  # other widths, other times
    chooser.record("nezha", 50, 0.3)
    assert chooser.choose(50, in_ms(100))[0] == "dense"
    chooser.record("dense", 50, 0.3)
    assert chooser.choose(50, in_ms(100))[0] == "nezha"  # none is in time: the first of them


def test_the_exact_one_is_tried_again():
    chooser = StrategyChooser(("beam", "nezha"))
    chooser.record("beam", 50, 1.0)
    turned_away = 0
    while chooser.choose(50, in_ms(300))[1]:
        turned_away += 1
        assert turned_away < 200
    assert turned_away > 20


def test_a_rising_load_is_seen():
    chooser = StrategyChooser(("beam", "nezha"))
    chooser.record("beam", 50, 0.01)
    for _ in range(60):
        chooser.record("beam", 50, 0.5)
    assert chooser.choose(50, in_ms(100))[1]


@pytest.fixture
def service(tmp_path):
    with Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu") as opened:
        yield opened


def test_an_answer_says_that_it_was_hurried(service):
    history = list(service.catalog.current.catalog.items.ids[:5])
    body = RecommendRequest(history=history, k=5)
    calm = service.recommender.begin(body, deadline_s=in_ms(60_000)).wait()
    assert calm.exact and "hurried" not in calm.degraded
    chooser = service.recommender.chooser
    if not chooser.quick:
        pytest.fail("the tiny bundle should hold a quick strategy")
    for _ in range(50):
        chooser.record(chooser.exact, 50, 1e4)
    hurried = service.recommender.begin(body, deadline_s=in_ms(60_000)).wait()
    assert hurried.strategy in chooser.quick and not hurried.exact
    assert "hurried" in hurried.degraded


def test_auto_says_beam_where_nothing_was_drafted(service):
    """Same slate either way; whoever names a strategy gets that name back."""
    history = list(service.catalog.current.catalog.items.ids[:5])
    strategy = service.engine._strategies["speculative"]
    found = {}
    for plan in (NO_DRAFT, UNCALIBRATED):
        strategy.policy.only = plan
        for asked in ("auto", "speculative"):
            answer = service.recommend(RecommendRequest(history=history, k=5, strategy=asked))
            found[plan, asked] = answer.strategy
            assert answer.exact
    assert found == {
        (NO_DRAFT, "auto"): "beam",
        (NO_DRAFT, "speculative"): "speculative",
        (UNCALIBRATED, "auto"): "speculative",
        (UNCALIBRATED, "speculative"): "speculative",
    }


def test_a_batch_job_has_beam_search_for_auto(service):
    """What it answers must not depend on the clock."""
    history = list(service.catalog.current.catalog.items.ids[:5])
    bodies = [RecommendRequest(history=history, k=5, strategy=s) for s in ("auto", "speculative")]
    assert [a.strategy for a in together(service)(bodies)] == ["beam", "speculative"]
