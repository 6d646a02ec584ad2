"""Events with `warm`: the next request of the user finds the prefix computed."""

import threading
import time

import pytest

from recserve.core.errors import DeadlineExceeded
from recserve.core.request import PrewarmQuery
from recserve.schemas.events import EventInput, EventsRequest
from recserve.schemas.items import RecommendRequest, UserRef
from recserve.service import Service, ServiceOptions, prewarm
from tests.support.background_work import settled
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
    ids = service.catalog.current.catalog.items.ids[first : first + count]
    return EventsRequest(events=[EventInput(user_id=user, item_id=i) for i in ids], warm=True)


def warm(service, user, **fields):
    assert service.add_events(events(service, user, **fields)).warmed == 2
    settled(service)


def ask(service, user, **fields):
    return service.recommend(RecommendRequest(user=UserRef(id=user), **fields))


def submitted(service, monkeypatch):
    """Requests that the engine is given from now on."""
    engine, found = service.engine, []
    submit = engine.submit

    def noted(request, client):
        found.append(request)
        return submit(request, client)

    monkeypatch.setattr(engine, "submit", noted)
    return found


def test_newer_events_take_the_place_of_a_prewarm_under_way(service, monkeypatch):
    """Of three calls that come while the engine is busy one is carried out."""
    engine = service.engine
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
    engine = service.engine
    warm(service, "other")
    before = engine.stats().pages_cached
    with engine.held():
        service.add_events(events(service, "me", first=40))
        futures = [waiting.future for waiting in engine.queue.background]
        deleting = threading.Thread(target=service.delete_user, args=("me",))
        deleting.start()  # it waits for the engine, to forget the prefixes there are
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
    engine = service.engine
    with engine.held():
        assert service.add_events(events(service, "me")).warmed == 2
        futures = [waiting.future for waiting in engine.queue.background]
    assert all(isinstance(f.exception(timeout=10), DeadlineExceeded) for f in futures)
    assert engine.stats().pages_cached == 0
