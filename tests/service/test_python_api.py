"""The Python API checks bodies like HTTP does, and takes plain values."""

import pickle

import numpy as np
import pytest

import recserve
from recserve import (
    Candidate,
    Exclusions,
    RankRequest,
    RecommendRequest,
    Service,
    ServiceOptions,
    UserRef,
)
from recserve.features.history.history import StoreUnavailable
from tests.support.tiny_bundle import shared_bundle


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    options = ServiceOptions(journal=folder / "items")
    with Service.open(shared_bundle(), f"lmdb:{folder}/users", "cpu", options) as opened:
        yield opened


@pytest.fixture(scope="module")
def samples(service):
    return service.samples(1, 3)


def ids(answer):
    return [item.item_id for item in answer.items]


def test_plain_values_equal_objects(service, samples):
    user, items = samples["users"][0], samples["items"]
    exclude = Exclusions(item_ids=items[:1])
    wanted = ids(service.recommend(RecommendRequest(user=UserRef(id=user), k=5, exclude=exclude)))
    plain = {"k": 5, "exclude": {"item_ids": items[:1]}}
    for body in (
        {"user": user, **plain},
        {"user": {"id": user}, **plain},
        RecommendRequest(user=user, k=5, exclude=plain["exclude"]),
        RecommendRequest(user={"id": user}, k=np.int64(5), exclude=exclude),
    ):
        assert ids(service.recommend(body)) == wanted
    listed = [Candidate(item_id=item) for item in items]
    ranked = service.rank(RankRequest(history=items[:1], candidates=listed))
    for candidates in (items, [{"item_id": item} for item in items], np.array(items)):
        assert ids(service.rank({"history": items[:1], "candidates": candidates})) == ids(ranked)
    event = {"user_id": "new", "item_id": items[0]}
    assert service.add_events({"events": [event]}).accepted == 1
    assert service.put_items({"items": [{"item_id": "fresh", "title": "Rose"}]}).inserted == 1


def test_a_second_service_on_one_store_says_what_to_do(tmp_path):
    store = f"lmdb:{tmp_path}/store"
    with Service.open(shared_bundle(), store, "cpu") as first:
        with pytest.raises(StoreUnavailable, match=r"close it first \(service\.close\(\)"):
            Service.open(shared_bundle(), store, "cpu")
        assert first.alive
    Service.open(shared_bundle(), store, "cpu").close()


def test_a_service_that_is_pickled_says_what_to_do(service):
    with pytest.raises(TypeError, match="open the bundle in each process"):
        pickle.dumps(service)


def test_public_names_are_found():
    assert {name for name in recserve.__all__ if getattr(recserve, name, None) is None} == set()
