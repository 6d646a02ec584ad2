"""Events with `warm`: a user's first question is proved in one round, whoever asks it."""

import threading
import time
from dataclasses import replace

import pytest

from recserve.config import ServerConfig
from recserve.core.request import DeadlineExceeded, WarmDraftRequest
from recserve.engine.engine_config import EngineConfig
from recserve.schemas.events import EventBody, EventsBody
from recserve.schemas.items import Exclude, ItemsBody, RecommendBody, UserRef
from recserve.search.strategies import speculative
from recserve.server.app import load
from recserve.service import Service, ServiceOptions
from recserve.service.recommend import warming
from recserve.service.recommend.usual import LATELY, Shape, Usual
from tests.support.background_work import settled
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

DEFAULT = Shape(10, 50, 0.0)


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


@pytest.fixture
def drafts(monkeypatch):
    """How often the head was asked for a draft: one entry each time."""
    asked = []
    likely = speculative.likely_prefixes

    def noted(*arguments):
        asked.append(1)
        return likely(*arguments)

    monkeypatch.setattr(speculative, "likely_prefixes", noted)
    return asked


def events(service, user, count=9, first=0):
    ids = service.runtime.snapshot.catalog.items.ids[first : first + count]
    return EventsBody(events=[EventBody(user_id=user, item_id=i) for i in ids], warm=True)


def warm(service, user, **fields):
    assert service.add_events(events(service, user, **fields)).warmed == 2
    settled(service)


def ask(service, user, **fields):
    return service.recommend(RecommendBody(user=UserRef(id=user), **fields))


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


def test_the_first_question_of_a_warmed_user_is_proved_in_one_round(service, drafts):
    warm(service, "me")
    answer = ask(service, "me", explain=True)
    assert (answer.strategy, answer.rounds, drafts) == ("speculative", 1, [])
    assert answer.explanation.root_tokens_computed == 0 < answer.explanation.root_tokens_cached
    assert same_as_beam(service, "me", answer).rounds > 1
    # What happens next is another history: warmed anew, answered in one round again.
    warm(service, "me", first=20, count=2)
    answer = ask(service, "me")
    assert answer.rounds == 1 and not drafts
    same_as_beam(service, "me", answer)


def test_in_the_invariant_mode_it_has_the_bits_of_beam_search(opened):
    with opened(engine=EngineConfig(invariant=True)) as service:
        warm(service, "me")
        answer = ask(service, "me")
        assert answer.rounds == 1 and slate(answer) == slate(ask(service, "me", strategy="beam"))


def test_another_question_of_a_warmed_user_is_still_right(service, drafts):
    ids = service.runtime.snapshot.catalog.items.ids
    others = (
        {"k": 7},
        {"k": 60},
        {"beam_width": 20},
        {"exclude": Exclude(seen=False)},
        {"exclude": Exclude(item_ids=[ids[40]])},
        {"dense_weight": 0.5},
        {"filter": {"not": {"in": ["item_id", list(ids[:100])]}}},
    )
    for number, fields in enumerate(others):
        warm(service, f"u{number}", first=number)
        answer = ask(service, f"u{number}", **fields)
        assert len(drafts) == number + 1
        same_as_beam(service, f"u{number}", answer, **fields)


def test_users_are_warmed_with_what_is_asked_lately(service, drafts):
    """Seen items may come back, five are wanted: asked of others, expected of the next."""
    fields = {"k": 5, "beam_width": 30, "exclude": Exclude(seen_within_s=3600.0)}
    warm(service, "first")
    ask(service, "first", **fields)
    assert len(drafts) == 1
    warm(service, "second", first=3)
    answer = ask(service, "second", **fields)
    assert answer.rounds == 1 and len(drafts) == 1
    same_as_beam(service, "second", answer, **fields)
    # Most questions have a filter now: no draft could be kept for them, so none is made.
    for _ in range(3):
        ask(service, "second", filter={"not": {"eq": ["item_id", "nothing"]}})
    made = len(drafts)
    warm(service, "third", first=5)
    ask(service, "third", **fields)
    assert len(drafts) == made + 1


def test_the_usual_question_is_the_most_frequent_of_the_last_ones():
    usual = Usual(DEFAULT)
    assert usual.shape == DEFAULT
    five = replace(DEFAULT, k=5)
    usual.asked(five)
    assert usual.shape == five  # as often as the default, but newer
    for _ in range(2):
        usual.asked(DEFAULT)
    usual.asked(None)
    assert usual.shape == DEFAULT
    for _ in range(LATELY):
        usual.asked(None)
    assert usual.shape is None
    usual.asked(five)
    assert usual.shape is None


def submitted(service, monkeypatch):
    """Requests that the engine is given from now on."""
    engine, found = service.runtime.engine, []
    submit = engine.submit

    def noted(request):
        found.append(request)
        return submit(request)

    monkeypatch.setattr(engine, "submit", noted)
    return found


def test_without_drafts_only_the_root_is_computed(opened, monkeypatch):
    with opened(warm_drafts=False) as service:
        found = submitted(service, monkeypatch)
        warm(service, "me")
        assert [type(request).__name__ for request in found] == ["WarmRequest"] * 2
        answer = ask(service, "me", explain=True)
        assert answer.explanation.root_tokens_computed == 0
        same_as_beam(service, "me", answer)


def test_a_draft_of_another_catalogue_version_is_not_used(service, drafts):
    ids = service.runtime.snapshot.catalog.items.ids
    warm(service, "me")
    service.put_items(ItemsBody(items=[{"item_id": "new", "title": "Plain small lamp"}]))
    best = ask(service, "me")
    assert len(drafts) == 1
    same_as_beam(service, "me", best)
    warm(service, "me", first=30, count=1)
    best = ask(service, "me").items[0].item_id
    assert len(drafts) == 1 and best in {*ids, "new"}
    service.hide_item(best)
    answer = ask(service, "me")
    assert len(drafts) == 2 and best not in {item.item_id for item in answer.items}
    same_as_beam(service, "me", answer)


def test_newer_events_take_the_place_of_a_warming_under_way(service, monkeypatch):
    """Of three calls that come while the engine is busy one is carried out."""
    engine = service.runtime.engine
    found = submitted(service, monkeypatch)
    futures = []
    with engine.held():
        for number in range(3):
            body = events(service, "me", first=number, count=1)
            assert service.add_events(body).warmed == 2
            futures.append([w.future for w in list(engine.background_queue)[-2:]])
        assert [f.cancelled() for pair in futures for f in pair] == [True] * 4 + [False] * 2
    settled(service)
    assert len(found) == 6 and isinstance(found[-1], WarmDraftRequest)
    assert not service.item_parts.warming._under_way
    assert ask(service, "me").rounds == 1


def test_a_deleted_user_is_not_warmed(service):
    """What is under way when the user goes is dropped: no page of the history is cached."""
    engine = service.runtime.engine
    warm(service, "other")
    before = engine.stats().pages_cached
    with engine.held():
        service.add_events(events(service, "me", first=40))
        futures = [waiting.future for waiting in engine.background_queue]
        deleting = threading.Thread(target=service.delete_user, args=("me",))
        deleting.start()  # it waits for the engine, to forget the roots there are
        until = time.monotonic() + 30
        while not all(future.cancelled() for future in futures) and time.monotonic() < until:
            time.sleep(0.001)
    deleting.join()
    assert all(future.cancelled() for future in futures)
    settled(service)
    assert len(futures) == 2 and engine.stats().pages_cached == before
    assert not service.item_parts.warming._under_way


def test_what_was_not_begun_in_time_is_dropped(service, monkeypatch):
    monkeypatch.setattr(warming, "WITHIN_S", -1.0)
    engine = service.runtime.engine
    with engine.held():
        assert service.add_events(events(service, "me")).warmed == 2
        futures = [waiting.future for waiting in engine.background_queue]
    assert all(isinstance(f.exception(timeout=10), DeadlineExceeded) for f in futures)
    assert engine.stats().pages_cached == 0


@pytest.mark.parametrize("value", [True, False])
def test_it_is_a_setting_of_the_server(tmp_path, monkeypatch, value):
    config = ServerConfig(
        bundle=shared_bundle(), store=f"lmdb:{tmp_path}/store", journal=tmp_path,
        device="cpu", warm_drafts=value, kv_bytes=2**24,
    )  # fmt: skip
    service = load(config)
    try:
        found = submitted(service, monkeypatch)
        warm(service, "me")
        assert isinstance(found[-1], WarmDraftRequest) == value
    finally:
        service.close()


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
    assert (drafted["strategy"], drafted["exact"], drafted["rounds"]) == ("speculative", True, 1)
    assert plain["rounds"] > 1 and len(drafted["items"]) == 10
    for mine, theirs in zip(drafted["items"], plain["items"], strict=True):
        assert mine["item_id"] == theirs["item_id"] and mine["rank"] == theirs["rank"]
        assert mine["score"] == pytest.approx(theirs["score"], abs=2e-5)
    assert [i["item_id"] for i in other["items"][:10]] == [i["item_id"] for i in plain["items"]]
    assert other["exact"] and len(other["items"]) == 25
