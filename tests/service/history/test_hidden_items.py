"""Events for items that have been taken out of the live catalogue stay in the history."""

import random

import pytest

from recserve.schemas.events import EventInput, EventsRequest
from recserve.schemas.items import (
    Candidate,
    Exclusions,
    RankRequest,
    RecommendRequest,
    RollbackRequest,
    UserRef,
)
from tests.support.live_catalogues import base_of, item_like, opened, put
from tests.support.live_server import live


def add(service, user, *item_ids, **fields):
    events = [EventInput(user_id=user, item_id=item, **fields) for item in item_ids]
    return service.add_events(EventsRequest(events=events))


def listed(service, user):
    return [event.item_id for event in service.history(user).events]


def assert_recommends(service, user, hidden):
    """Slate and ranking read the whole history, like one in the body, and show no hidden item."""
    ids = listed(service, user)
    fields = {"k": 50, "strategy": "beam", "exclude": Exclusions(seen=False)}
    stored = service.recommend(RecommendRequest(user=UserRef(id=user), **fields))
    inline = service.recommend(RecommendRequest(history=ids, **fields))
    assert stored.degraded == inline.degraded == []
    assert [i.item_id for i in stored.items] == [i.item_id for i in inline.items]
    assert not {i.item_id for i in stored.items} & set(hidden)
    candidates = [Candidate(item_id=i) for i in base_of(service).items.ids[-9:]]
    ranked = service.rank(RankRequest(user=UserRef(id=user), candidates=candidates))
    assert len(ranked.items) == 9 and not ranked.degraded


@pytest.mark.parametrize("seed", range(3))
def test_events_of_hidden_items_are_kept(tmp_path, seed):
    """Items of the bundle and later ones; hidden, put back, rolled back, and after a restart."""
    draw = random.Random(seed)
    with opened(tmp_path) as service:
        put(service, *[item_like(service, f"late{n}", 20 * n) for n in range(4)])
        name = put(service, item_like(service, "late4")).catalog_version
        ids = base_of(service).items.ids[:400]
        hidden = [*draw.sample(ids, 5), *draw.sample([f"late{n}" for n in range(5)], 3)]
        for item in hidden:
            service.hide_item(item)
        draw.shuffle(hidden)
        added = add(service, "u", ids[450 - 400], *hidden, ids[7])
        assert added.accepted == 10 and not added.rejected
        assert listed(service, "u") == [ids[50], *hidden, ids[7]]
        assert_recommends(service, "u", hidden)
        unknown = add(service, "u", "never", type="click")
        assert [r.reason for r in unknown.rejected] == ["unknown item 'never'"]
    with opened(tmp_path) as service:
        assert listed(service, "u") == [ids[50], *hidden, ids[7]]
        assert add(service, "v", *hidden).accepted == 8
        assert_recommends(service, "v", hidden)
        put(service, {"item_id": hidden[0]})
        assert add(service, "v", *hidden).accepted == 8
        assert_recommends(service, "v", hidden[1:])
        service.rollback_items(RollbackRequest(catalog_version=name))
        assert add(service, "v", *hidden).accepted == 8
        assert listed(service, "v") == hidden * 3
        assert_recommends(service, "v", [])


def test_a_click_on_a_hidden_item_is_attributed_and_corrected(tmp_path):
    service = opened(tmp_path)
    with live(service) as client:
        body = {"user": {"id": "u"}, "k": 5}
        slate = client.post("/v1/recommend", json=body).json()
        token, item = slate["attribution_token"], slate["items"][3]["item_id"]
        assert client.delete(f"/v1/items/{item}").status_code == 200
        event = {"user_id": "u", "item_id": item, "event_id": "e", "attribution_token": token}
        answer = client.post("/v1/events", json={"events": [event], "warm": True}).json()
        assert answer["accepted"] == 1 and not answer["rejected"]
        assert "unattributed" not in answer and answer["warmed"] >= 1
        change = {**event, "correction": "replace", "value": 2.0}
        assert client.post("/v1/events", json={"events": [change]}).json()["corrected"] == 1
        events = client.get("/v1/users/u/history").json()["events"]
        assert [event["item_id"] for event in events] == [item]
        answer = client.post("/v1/events", json={"events": [{"user_id": "u", "item_id": "never"}]})
        assert answer.json()["rejected"][0]["reason"] == "unknown item 'never'"
