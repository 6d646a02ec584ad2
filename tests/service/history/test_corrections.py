"""Corrected and late events: answers as if it had never been otherwise, and no old prefix stays."""

import threading
import time
from functools import partial

import pytest

from recserve.engine.engine_config import EngineConfig
from recserve.schemas.events import EventInput, EventsRequest
from recserve.service import Service, ServiceOptions
from tests.support.background_work import settled
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

USER = "me"
PAGE = 4


@pytest.fixture
def opened(tmp_path):
    """Services with stores of their own, and pages of four tokens."""

    def make(name="store", **settings):
        settings.setdefault("kv_bytes", 2**22)
        store = f"lmdb:{tmp_path}/{name}"
        options = ServiceOptions(EngineConfig(page_size=PAGE, **settings), journal=tmp_path / name)
        return Service.open(shared_bundle(), store, "cpu", options)

    return make


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    store = f"lmdb:{tmp_path_factory.mktemp('looked-at')}/store"
    with Service.open(shared_bundle(), store, "cpu") as one:
        return one.samples(0, 60)["items"]


def event(ids, number, day=None, **fields):
    """Event `number`, on its own day unless said otherwise."""
    day = number + 1 if day is None else day
    said = {"user_id": USER, "item_id": ids[number], "event_id": f"e{number}", "type": "click"}
    return {**said, "timestamp": f"2026-03-{day:02d}T10:00:00Z", **fields}


def post(client, *events, **fields):
    answer = client.post("/v1/events", json={"events": events, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(client, ids, **fields):
    """A slate and a ranking: ids, order and every score; and prefix tokens that were computed."""
    asked = {"user": {"id": USER}, "explain": True, **fields}
    slate = client.post("/v1/recommend", json=asked).json()
    shown = [{"item_id": i, "shown_at": "2026-06-01T00:00:00Z"} for i in ids[40:55]]
    ranking = client.post("/v1/rank", json={"user": {"id": USER}, "candidates": shown}).json()
    scores = [(i["item_id"], i["score"]) for i in slate["items"]]
    tasks = [(i["item_id"], task, s) for i in ranking["items"] for task, s in i["scores"].items()]
    return scores + tasks, slate["explanation"]


def same(found, expected, exactly):
    assert [x[:-1] for x in found] == [x[:-1] for x in expected]
    close = partial(pytest.approx, rel=0, abs=0 if exactly else 2e-5)
    assert [x[-1] for x in found] == [close(x[-1]) for x in expected]


def removal(number):
    return {"user_id": USER, "event_id": f"e{number}", "correction": "remove"}


def cases(ids):
    """By name: events sent, and the history that there should have been. Of 12 events the ranker
    reads 4 as long history and 8 as recent ones.
    """
    plain = [event(ids, n) for n in range(12)]
    replaced = event(ids, 9, item_id=ids[30], type="purchase", value=3.0)
    untimed = {k: v for k, v in replaced.items() if k != "timestamp"}
    moved = event(ids, 9, day=4, type="purchase")
    late = event(ids, 35, day=6)
    liked = event(ids, 11, type="like")
    replace = {"correction": "replace"}
    return {
        "replace": ([replaced | replace], [*plain[:9], replaced, *plain[10:]]),
        "replace, time kept": ([untimed | replace], [*plain[:9], replaced, *plain[10:]]),
        "replace and move": ([moved | replace], [*plain[:4], moved, *plain[4:9], *plain[10:]]),
        "replace the type": ([liked | replace], [*plain[:11], liked]),
        "remove": ([removal(9)], [*plain[:9], *plain[10:]]),
        "remove the first": ([removal(0)], plain[1:]),
        "late": ([late], [*plain[:6], late, *plain[6:]]),
        "several": (
            [removal(3), late, event(ids, 12), removal(11), liked, replaced | replace],
            [*plain[:3], *plain[4:6], late, *plain[6:9], replaced, plain[10], liked]
            + [event(ids, 12)],
        ),
    }


CASES = list(cases(list(map(str, range(60)))))
SHOWN = ("remove", "replace and move", "several")


@pytest.mark.parametrize(
    "name, invariant",
    [
        pytest.param(name, number % 2 == 0, marks=[] if name in SHOWN else [pytest.mark.slow])
        for number, name in enumerate(CASES)
    ],
)
def test_answers_are_those_of_a_history_that_was_always_so(opened, ids, name, invariant):
    sent, expected = cases(ids)[name]
    with live(opened("fresh", invariant=invariant)) as client:
        assert post(client, *expected)["accepted"] == len(expected)
        right, _ = ask(client, ids)
    with live(opened(invariant=invariant)) as client:
        post(client, *[event(ids, n) for n in range(12)])
        for _ in range(2):  # prefixes and drafts are there
            wrong, _ = ask(client, ids)
        answer = post(client, *sent)
        corrections = sum("correction" in one for one in sent)
        counts = (answer["corrected"], answer["accepted"], answer["duplicates"])
        assert counts == (corrections, len(sent) - corrections, 0) and answer["rejected"] == []
        first, _ = ask(client, ids)
        again, explained = ask(client, ids)
        assert explained["root_tokens_computed"] == 0
    assert right != wrong
    same(first, right, exactly=invariant)
    same(again, right, exactly=invariant)


@pytest.mark.parametrize(
    "name, recommender, ranker",
    [
        # 10 of 13 rows stay, two pages of four in each model
        pytest.param("remove", 8, 8, marks=pytest.mark.slow),
        ("replace and move", 4, 4),  # 5 rows; the ranker's first 5 see each other and are the same
        ("remove the first", 0, 0),
        ("several", 4, 0),  # an event of the long history is gone
        ("replace the type", 13, 12),  # the recommender reads no types
    ],
)
def test_of_the_old_prefixes_only_what_is_still_so_stays(opened, ids, name, recommender, ranker):
    sent, _ = cases(ids)[name]
    with opened() as one, live(one) as client:
        post(client, *[event(ids, n) for n in range(12)])
        assert one.gauges().kv_pages["cached"] == 0
        _, explained = ask(client, ids)
        assert one.gauges().kv_pages["cached"] == 4 + 4
        assert len(one.histories.prewarm.ranker._cache) == 1
        post(client, *sent)
        pages = -(-recommender // PAGE) + -(-ranker // PAGE)
        assert one.gauges().kv_pages["cached"] == pages
        assert len(one.histories.prewarm.ranker._cache) == 0
        old = {"history": ids[:12], "user": None}
        asked = client.post("/v1/recommend", json={**old, "explain": True}).json()
        assert asked["explanation"]["root_tokens_cached"] == recommender


def test_prefixes_of_others_stay(opened, ids):
    with opened() as one, live(one) as client:
        post(client, *[{**event(ids, n), "user_id": "other"} for n in range(20, 30)], warm=True)
        settled(one)
        there, kept = one.gauges().kv_pages["cached"], dict(one.histories.prewarm.ranker._cache)
        post(client, *[event(ids, n) for n in range(12)], warm=True)
        settled(one)
        assert one.gauges().kv_pages["cached"] > there
        post(client, removal(0))
        assert one.gauges().kv_pages["cached"] == there > 0
        assert dict(one.histories.prewarm.ranker._cache) == kept and len(kept) == 1


def test_what_was_under_way_for_the_old_history_is_dropped(opened, ids):
    with opened() as one:
        engine = one.engine
        first = [EventInput(**event(ids, n)) for n in range(5)]
        correction = EventsRequest(events=[EventInput(**removal(0))])
        with engine.held():
            one.add_events(EventsRequest(events=first, warm=True))
            futures = [waiting.future for waiting in engine.queue.background]
            correcting = threading.Thread(target=one.add_events, args=(correction,))
            correcting.start()  # it waits for the engine, to forget the prefixes there are
            until = time.monotonic() + 30
            while not all(future.cancelled() for future in futures) and time.monotonic() < until:
                time.sleep(0.001)
        correcting.join()
        settled(one)
        assert len(futures) == 2 and all(future.cancelled() for future in futures)
        assert one.gauges().kv_pages["cached"] == 0 and not one.histories.prewarm._under_way


def test_events_at_the_end_forget_nothing_and_read_nothing(opened, ids, monkeypatch):
    def add(*events):
        return one.add_events(EventsRequest(events=[EventInput(**event) for event in events]))

    with opened() as one:
        add(*[event(ids, n) for n in range(5)])
        found = []
        monkeypatch.setattr(
            one.histories.prewarm, "forget", lambda revisions, _: found.extend(revisions)
        )
        monkeypatch.setattr(one.histories.store, "get_many", found.append)
        answer = add(event(ids, 5), event(ids, 6), event(ids, 6), removal(40))
        assert (answer.accepted, answer.duplicates, answer.corrected) == (2, 1, 0)
        assert found == []
        add(event(ids, 7, day=2))
        assert found == [USER]
