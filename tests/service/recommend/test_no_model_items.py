"""`exact` and `degraded` of slates to which the model gave nothing, or less than k items."""

from concurrent.futures import Future

import numpy as np
import pytest

from recserve.core.request import Slate
from recserve.schemas.items import Diversity, Exclusions, RecommendRequest
from recserve.service import Service, ServiceOptions
from tests.support.tiny_bundle import shared_bundle


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    with Service.open(
        shared_bundle(), f"lmdb:{folder}/store", "cpu", ServiceOptions(journal=folder / "i")
    ) as one:
        yield one


def body(service, **fields):
    history = service.catalog.current.catalog.items.ids[:3]
    return RecommendRequest(**{"history": history, "exclude": Exclusions(seen=False)} | fields)


def finding(service, rows, monkeypatch, exact=True):
    """The engine finds these rows and no others, whatever it is asked."""
    slate = Slate(np.array(rows, np.int64), np.zeros(len(rows), np.float32), exact, 2)

    def submit_all(queries, client):
        futures = [Future() for _ in queries]
        for future in futures:
            future.set_result(slate)
        return futures

    monkeypatch.setattr(service.engine, "submit_all", submit_all)


def sources(answer):
    return [item.source for item in answer.items]


@pytest.mark.parametrize("strategy", ["auto", "beam", "speculative", "nezha"])
def test_a_model_that_finds_nothing_is_not_exact(service, strategy, monkeypatch):
    finding(service, [], monkeypatch, exact=strategy != "nezha")
    answer = service.recommend(body(service, strategy=strategy))
    assert answer.degraded == ["no_model_items"] and not answer.exact
    assert sources(answer) == ["popular"] * 10


def test_a_model_that_finds_less_than_there_is_is_not_exact(service, monkeypatch):
    finding(service, [5, 9], monkeypatch)
    answer = service.recommend(body(service))
    assert answer.degraded == [] and not answer.exact
    assert sources(answer) == ["model"] * 2 + ["popular"] * 8


def test_a_full_slate_is_exact(service):
    answer = service.recommend(body(service))
    assert answer.degraded == [] and answer.exact
    assert sources(answer) == ["model"] * 10


@pytest.mark.parametrize("strategy", ["beam", "speculative"])
@pytest.mark.parametrize("left", [0, 1, 4])
def test_what_a_filter_leaves_is_exact(service, strategy, left):
    """Beam search went through all of it: there is no other item."""
    ids = service.catalog.current.catalog.items.ids
    tree = {"in": ["item_id", [*ids[20 : 20 + left], "no such item"]]}
    answer = service.recommend(body(service, strategy=strategy, filter=tree))
    assert answer.degraded == ["unknown_filter_values", "fewer_than_k"] and answer.exact
    assert sources(answer) == ["model"] * left
    assert {item.item_id for item in answer.items} == set(ids[20 : 20 + left])


def test_what_exclusions_leave_is_exact(service):
    ids = service.catalog.current.catalog.items.ids
    fields = {"exclude": Exclusions(item_ids=ids[2:], seen=False), "k": 5}
    answer = service.recommend(body(service, **fields))
    assert answer.degraded == ["fewer_than_k"] and answer.exact
    assert {item.item_id for item in answer.items} == set(ids[:2])


def test_what_caps_leave_is_exact(service):
    """One item of each code of the first level, and no more: fewer than were asked for."""
    answer = service.recommend(body(service, k=50, diversity=Diversity(prefix=(0, 1))))
    first = service.catalog.current.catalog.semantic_ids.codes[:, 0]
    assert len(answer.items) == len(set(first.tolist())) < 50
    assert answer.degraded == ["fewer_than_k"] and answer.exact
    assert set(sources(answer)) == {"model"}


def test_a_user_without_history_is_a_cold_start_only(service):
    answer = service.recommend(body(service, history=[]))
    assert answer.degraded == ["cold_start"] and not answer.exact


def test_a_filter_that_leaves_nothing_is_not_the_models_fault(service, monkeypatch):
    finding(service, [], monkeypatch)
    tree = {"eq": ["item_id", "no such item"]}
    answer = service.recommend(body(service, filter=tree))
    assert (
        answer.degraded == ["unknown_filter_values", "fewer_than_k"]
        and answer.exact
        and answer.items == []
    )
