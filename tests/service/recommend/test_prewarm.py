"""Events with `warm`: the next request of the user finds the prefix computed."""

import threading
import time

import pytest

from recserve.core.errors import DeadlineExceeded
from recserve.core.request import PrewarmQuery
from recserve.schemas.events import EventInput, EventsRequest
from recserve.schemas.items import RecommendRequest, UserRef
from recserve.service import Service, ServiceOptions
from recserve.service.recommend import prewarm
from tests.support.background_work import settled
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle


@pytest.fixture
def opened(tmp_path):
    def make(**settings):
        store = f"lmdb:{tmp_path}/store"
        options = ServiceOptions(journal=tmp_path / "items", **settings)
        return Service.open(shared_bundle(), store, "cpu", options)

    return make


@pytest.fixture
def service(opened):
    with opened() as made:
        yield made


def events(service, user, count=9, first=0):
    ids = service.runtime.snapshot.catalog.items.ids[first : first + count]
    return EventsRequest(events=[EventInput(user_id=user, item_id=i) for i in ids], warm=True)


def warm(service, user, **fields):
    assert service.add_events(events(service, user, **fields)).warmed == 2
    settled(service)


def ask(service, user, **fields):
    return service.recommend(RecommendRequest(user=UserRef(id=user), **fields))


def slate(answer):
    return [(item.item_id, item.score, item.rank, item.source) for item in answer.items]


def same_as_beam(service, user, answer, **fields):
    plain = ask(service, user, strategy="beam", **fields)
    found, expected = slate(answer), slate(plain)
    assert answer.exact and [x[:1] + x[2:] for x in found] == [x[:1] + x[2:] for x in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine[1] is None) == (theirs[1] is None)
        assert mine[1] is None or mine[1] == pytest.approx(theirs[1], abs=2e-5)
    return plain


def submitted(service, monkeypatch):
    """Requests that the engine is given from now on."""
    engine, found = service.runtime.engine, []
    submit = engine.submit

    def noted(request):
        found.append(request)
        return submit(request)

    monkeypatch.setattr(engine, "submit", noted)
    return found


def test_the_roots_are_computed(opened, monkeypatch):
    with opened() as service:
        found = submitted(service, monkeypatch)
        warm(service, "me")
        assert [type(request).__name__ for request in found] == ["PrewarmQuery"] * 2
        answer = ask(service, "me", explain=True)
        assert answer.explanation.root_tokens_computed == 0
        same_as_beam(service, "me", answer)


def test_newer_events_take_the_place_of_a_prewarm_under_way(service, monkeypatch):
    """Of three calls that come while the engine is busy one is carried out."""
    engine = service.runtime.engine
    found = submitted(service, monkeypatch)
    futures = []
    with engine.held():
        for number in range(3):
            body = events(service, "me", first=number, count=1)
            assert service.add_events(body).warmed == 2
            futures.append([w.future for w in list(engine.queue.background)[-2:]])
        assert [f.cancelled() for pair in futures for f in pair] == [True] * 4 + [False] * 2
    settled(service)
    assert len(found) == 6 and isinstance(found[-1], PrewarmQuery)
    assert not service.histories.prewarm._under_way
    answer = ask(service, "me", explain=True)
    assert answer.explanation.root_tokens_computed == 0


def test_a_deleted_user_is_not_warmed(service):
    """What is under way when the user goes is dropped: no page of the history is cached."""
    engine = service.runtime.engine
    warm(service, "other")
    before = engine.stats().pages_cached
    with engine.held():
        service.add_events(events(service, "me", first=40))
        futures = [waiting.future for waiting in engine.queue.background]
        deleting = threading.Thread(target=service.delete_user, args=("me",))
        deleting.start()  # it waits for the engine, to forget the roots there are
        until = time.monotonic() + 30
        while not all(future.cancelled() for future in futures) and time.monotonic() < until:
            time.sleep(0.001)
    deleting.join()
    assert all(future.cancelled() for future in futures)
    settled(service)
    assert len(futures) == 2 and engine.stats().pages_cached == before
    assert not service.histories.prewarm._under_way


def test_what_was_not_begun_in_time_is_dropped(service, monkeypatch):
    monkeypatch.setattr(prewarm, "PREWARM_TIMEOUT_S", -1.0)
    engine = service.runtime.engine
    with engine.held():
        assert service.add_events(events(service, "me")).warmed == 2
        futures = [waiting.future for waiting in engine.queue.background]
    assert all(isinstance(f.exception(timeout=10), DeadlineExceeded) for f in futures)
    assert engine.stats().pages_cached == 0


def test_over_http(opened):
    service = opened()
    with live(service) as client:
        happened = [{"user_id": "me", "item_id": e.item_id} for e in events(service, "me").events]
        body = {"events": happened, "warm": True}
        answer = client.post("/v1/events", json=body).json()
        assert (answer["accepted"], answer["warmed"]) == (9, 2)
        settled(service)
        assert "\nrecserve_background_depth 0.0" in client.get("/metrics").text
        asked = {"user": {"id": "me"}}
        drafted = client.post("/v1/recommend", json=asked).json()
        plain = client.post("/v1/recommend", json={**asked, "strategy": "beam"}).json()
        other = client.post("/v1/recommend", json={**asked, "k": 25}).json()
    assert (drafted["strategy"], drafted["exact"]) == ("speculative", True)
    assert plain["rounds"] > 1 and len(drafted["items"]) == 10
    for mine, theirs in zip(drafted["items"], plain["items"], strict=True):
        assert mine["item_id"] == theirs["item_id"] and mine["rank"] == theirs["rank"]
        assert mine["score"] == pytest.approx(theirs["score"], abs=2e-5)
    assert [i["item_id"] for i in other["items"][:10]] == [i["item_id"] for i in plain["items"]]
    assert other["exact"] and len(other["items"]) == 25
