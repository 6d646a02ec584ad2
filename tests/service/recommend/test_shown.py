"""What a user was shown: counted as a plain list says, over stores and doors."""

import datetime
import json
import random
import time

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import redis

from recserve import Service, ServiceOptions
from recserve.batch.generate import Defaults, Generator
from recserve.batch.together import together
from recserve.features.history.event_kinds import EventKinds
from recserve.features.history.history import StoreUnavailable
from recserve.schemas.items import InvalidRequest
from recserve.service.shown import record_id
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

KINDS = EventKinds(read=("impression",))
HOUR_US, DAY_US = 3_600_000_000, 86_400_000_000
ALL = 500  # items of the bundle
WIDE = {"beam_width": 700, "strategy": "beam"}


def open_service(url, folder, **options):
    options = ServiceOptions(journal=folder / "items", event_kinds=KINDS, **options)
    return Service.open(shared_bundle(), url, "cpu", options)


@pytest.fixture(params=["lmdb", "redis"])
def url(request, tmp_path):
    if request.param == "lmdb":
        return f"lmdb:{tmp_path}/store"
    found = request.getfixturevalue("redis_url")
    redis.Redis.from_url(found).flushall()
    return found


class World:
    """A server, and a plain list of what each user was shown and clicked."""

    def __init__(self, service, client, draw):
        self.service, self.client, self.draw = service, client, draw
        self.ids = service.catalog.current.catalog.items.ids
        self.pool = draw.sample(self.ids, 8)
        self.now_us = time.time_ns() // 1000 - 40 * DAY_US
        self.shown, self.clicks, self.read = [], [], []  # (user, time, item)
        service.histories.shown.clock = service.catalog.clock = lambda: self.now_us

    def event(self, user, kind):
        item = self.draw.choice(self.pool)
        moment = datetime.datetime.fromtimestamp(self.now_us / 1e6, datetime.UTC).isoformat()
        event = {"user_id": user, "item_id": item, "type": kind, "timestamp": moment}
        event["event_id"] = f"e{self.draw.getrandbits(60)}"
        assert self.service.add_events({"events": [event]}).accepted == 1
        (self.clicks if kind == "click" else self.read).append((user, self.now_us, item))

    def show(self, user):
        """A request that says what was shown; a repeated request counts once."""
        ids = self.draw.choices(self.pool, k=self.draw.randrange(1, 9))
        body = {"user": {"id": user}, "k": 3, "strategy": "popular", "shown_ids": ids}
        body["request_id"] = f"r{self.draw.getrandbits(60)}"
        for _ in range(self.draw.choice([1, 1, 2])):
            if self.draw.random() < 0.5:
                self.service.recommend(body)
            else:
                assert self.client.post("/v1/recommend", json=body).status_code == 200
        self.shown += [(user, self.now_us, item) for item in set(ids)]

    def delete(self, user):
        if self.draw.random() < 0.5:
            self.service.delete_user(user)
        else:
            assert self.client.delete(f"/v1/users/{user}").status_code == 204
        for kept in (self.shown, self.clicks, self.read):
            kept[:] = [one for one in kept if one[0] != user]

    def counts(self, user, within_us, extra=()):
        """The plain loop: how often each item was shown without a click since."""
        found = {}
        now = [(user, self.now_us, item) for item in set(extra)]
        for who, when, item in [*self.read, *self.shown, *now]:
            if who != user or (within_us is not None and when < self.now_us - within_us):
                continue
            if any(w == user and i == item and t >= when for w, t, i in self.clicks):
                continue
            found[item] = found.get(item, 0) + 1
        return found


def through(world, door, body):
    """Items and scores of a request through a door."""
    if door == "python":
        items = world.service.recommend(body).items
        return [(one.item_id, one.score) for one in items]
    if door == "http":
        answer = world.client.post("/v1/recommend", json=body)
        assert answer.status_code == 200, answer.text
        return [(one["item_id"], one["score"]) for one in answer.json()["items"]]
    rules = {n: json.dumps(body[n]) for n in ("exclude_shown", "discount_shown") if n in body}
    if door == "v2":
        user = {"name": "user_id", "datatype": "BYTES", "shape": [1], "data": [body["user"]["id"]]}
        k = {"name": "k", "datatype": "INT64", "shape": [1], "data": [body["k"]]}
        parameters = {**rules, **WIDE, "strategy": body["strategy"]}
        parameters["exclude_seen"] = body["exclude"]["seen"]
        sent = {"inputs": [user, k], "parameters": parameters}
        answer = world.client.post("/v2/models/recommend/infer", json=sent)
        assert answer.status_code == 200, answer.text
        found = {one["name"]: one["data"] for one in answer.json()["outputs"]}
        pairs = zip(found["item_id"], found["score"], strict=True)
        return [pair for pair in pairs if pair[0]]
    row = {"user_id": body["user"]["id"], "k": body["k"], "strategy": body["strategy"], **rules}
    defaults = Defaults(beam_width=700, exclude_seen=body["exclude"]["seen"])
    generated = Generator(together(world.service), defaults)(pa.Table.from_pylist([row]))
    assert not generated.errors.num_rows, generated.example
    return [(one["item_id"], one["score"]) for one in generated.answers.to_pylist()]


def check(world, user):
    draw, ids = world.draw, world.ids
    door = draw.choice(["python", "http", "v2", "batch"])
    strategy = draw.choice(["beam", "beam", "similar", "popular"])
    seen = draw.random() < 0.5
    k = draw.choice([3, 40, 400])
    hours = draw.choice([None, 1, 6, 48])
    window = {} if hours is None else {"within": f"{hours}h"}
    within_us = None if hours is None else hours * HOUR_US
    body = {"user": {"id": user}, "k": k, **WIDE, "strategy": strategy, "exclude": {"seen": seen}}
    extra = draw.sample(world.pool, 3) if door in ("python", "http") and draw.random() < 0.3 else []
    counts = world.counts(user, within_us, extra)
    rules, out, by = {}, set(), 0.0
    if draw.random() < 0.6:
        times = draw.choice([1, 2, 3])
        rules["exclude_shown"] = {**window, "times": times}
        out = {item for item, count in counts.items() if count >= times}
    if not rules or draw.random() < 0.5:
        by = draw.choice([0.01, 0.3, 5.0])
        rules["discount_shown"] = {**window, "by": by}
    if seen:  # of positive events, since the showings are judged by the rules
        out |= {item for who, _, item in world.clicks if who == user}
    plain = {**body, "k": ALL, "exclude": {"seen": False}}
    ranked = [one for one in world.service.recommend(plain).items]
    has_scores = strategy != "popular" and any(one.score is not None for one in ranked)
    left = [(one.item_id, one.score) for one in ranked if one.item_id not in out]
    if has_scores:
        lowered = [
            (item, score and float(np.float32(score) - np.float32(by * counts.get(item, 0))))
            for item, score in left
        ]
        row = {item: number for number, item in enumerate(ids)}
        expected = sorted(lowered, key=lambda one: (-one[1], row[one[0]]))[:k]
    else:
        late = [one for one in left if by and one[0] in counts]
        expected = ([one for one in left if one not in late] + late)[:k]
    given = {"shown_ids": extra, "request_id": f"q{draw.getrandbits(60)}"} if extra else {}
    found = through(world, door, {**body, **rules, **given})
    world.shown += [(user, world.now_us, item) for item in extra]
    where = (door, strategy, rules, seen, k)
    assert [item for item, _ in found] == [item for item, _ in expected], where
    for (_, score), (_, wanted) in zip(found, expected, strict=True):
        assert (score is None) == (wanted is None), where
        assert score is None or score == pytest.approx(wanted, abs=1e-4), where


@pytest.mark.parametrize("seed", range(3))
def test_what_was_shown_is_what_a_plain_list_says(url, tmp_path, seed):
    draw = random.Random(seed)
    service = open_service(url, tmp_path)
    with live(service) as client:
        world = World(service, client, draw)
        for _ in range(150):
            user = draw.choice(["ann", "ü/ben"])
            world.now_us += draw.choice([0, 0, 1, 1, HOUR_US // 4, HOUR_US, 5 * HOUR_US])
            step = draw.random()
            if step < 0.25:
                world.event(user, "click")
            elif step < 0.4:
                world.event(user, "impression")
            elif step < 0.55:
                world.show(user)
            elif step < 0.57 and "/" not in user:
                world.delete(user)
            else:
                check(world, user)


def test_answers_count_only_where_a_setting_asks_for_it(url, tmp_path):
    """They are written behind the answer, are there after a restart, and go with the user."""
    rule = {"exclude_shown": {"within": "1h", "times": 2}, "k": 5, "user": {"id": "ann"}}
    with open_service(url, tmp_path) as service:
        first = [service.recommend(rule) for _ in range(4)]
        assert len({tuple(i.item_id for i in one.items) for one in first}) == 1
        assert not service.histories.store.get(record_id("ann")).size
    with live(open_service(url, tmp_path, shown_from_answers=True)) as client:
        pages = [client.post("/v1/recommend", json=rule).json() for _ in range(3)]
        ids = [[item["item_id"] for item in page["items"]] for page in pages]
        assert ids[0] == ids[1] and not set(ids[1]) & set(ids[2])
        untracked = client.post("/v1/recommend", json=rule, headers={"x-recserve-untracked": "1"})
        assert untracked.status_code == 200
        refused = client.post("/v1/recommend", json={**rule, "shown_ids": ids[0]})
        assert refused.status_code == 422 and refused.json()["error"]["param"] == "shown_ids"
        assert client.get("/v1/users").json()["users"].count("ann") == 0  # she has no event
    with open_service(url, tmp_path, shown_from_answers=True) as service:
        record = service.histories.shown.read("ann")
        assert record.size >= 15
        service.recommend(rule)
        service.delete_user("ann")
        assert not service.histories.shown.read("ann").size
        again = service.recommend(rule)
        assert [item.item_id for item in again.items] == ids[0]
    with open_service(url, tmp_path) as service:
        assert service.histories.store.get(record_id("ann")).size == 5


@pytest.mark.parametrize("strategy", ["beam", "nezha", "similar", "popular"])
def test_caps_and_quotas_hold_among_lowered_items(service, strategy):
    body = {
        "user": {"id": "user000001"},
        "k": 8,
        "strategy": strategy,
        "diversity": {
            "caps": [{"field": "brand", "most": 1}],
            "at_least": {"count": 2, "filter": {"range": ["price", 30, None]}},
        },
    }
    before = [one.item_id for one in service.recommend(body).items]
    rule = {"discount_shown": {"by": 1000}, "shown_ids": before[:5]}
    answer = service.recommend({**body, **rule})
    items = [service.item(one.item_id) for one in answer.items]
    brands = [item.attributes["brand"] for item in items if item.attributes.get("brand")]
    assert len(set(brands)) == len(brands) and len(items) == 8
    assert sum((item.attributes["price"] or 0) >= 30 for item in items) >= 2
    assert [item.item_id for item in items] != before
    only = {"filter": {"in": ["item_id", before[:5]]}}  # nothing else is allowed
    left = service.recommend({**body, **only, **rule, "request_id": "r"})
    assert {one.item_id for one in left.items} == set(before[:5])


def test_a_deleted_user_is_not_written_again(url, tmp_path):
    """A deletion waits for what is being written, and drops what is not."""
    with open_service(url, tmp_path, shown_from_answers=True) as service:
        shown = service.histories.shown
        for _ in range(30):
            for _ in range(3):
                service.recommend({"user": {"id": "ann"}, "strategy": "popular", "k": 20})
            service.delete_user("ann")
            assert not shown.read("ann").size
        shown.close()
        assert not service.histories.store.get(record_id("ann")).size


def test_the_record_is_bounded(tmp_path):
    with open_service(f"lmdb:{tmp_path}/store", tmp_path) as service:
        ids = service.catalog.current.catalog.items.ids
        cap = service.histories.store.cap
        for number in range(8):
            body = {"user": {"id": "ann"}, "strategy": "popular", "shown_ids": ids}
            service.recommend({**body, "request_id": f"r{number}"})
        service.histories.shown.close()
        assert cap <= service.histories.store.get(record_id("ann")).size <= 2 * cap


def test_a_store_that_fails_leaves_nothing_out_and_says_so(service, monkeypatch):
    body = {"user": {"id": "ann"}, "exclude_shown": {}}
    read = service.histories.store.read

    def fail(user_id):
        if user_id == record_id("ann"):
            raise StoreUnavailable("down")
        return read(user_id)

    monkeypatch.setattr(service.histories.store, "read", fail)
    assert "shown_unavailable" in service.recommend(body).degraded
    assert "shown_unavailable" not in service.recommend({"user": {"id": "ann"}}).degraded


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"exclude_shown": {"within": "6"}}, "exclude_shown.within"),
        ({"exclude_shown": {"within": "0h"}}, "exclude_shown.within"),
        ({"exclude_shown": {"within": "-6h"}}, "exclude_shown.within"),
        ({"exclude_shown": {"within": "6 hours"}}, "exclude_shown.within"),
        ({"exclude_shown": {"within": "99999d"}}, "exclude_shown.within"),
        ({"exclude_shown": {"within": 6}}, "exclude_shown.within"),
        ({"exclude_shown": {"times": 0}}, "exclude_shown.times"),
        ({"exclude_shown": {"times": 1.5}}, "exclude_shown.times"),
        ({"exclude_shown": {"often": 1}}, "exclude_shown.often"),
        ({"discount_shown": {}}, "discount_shown.by"),
        ({"discount_shown": {"by": 0}}, "discount_shown.by"),
        ({"discount_shown": {"by": 1001}}, "discount_shown.by"),
        ({"shown_ids": [""]}, "shown_ids[0]"),
        ({"shown_ids": ["x"] * 1001}, "shown_ids"),
        ({"exclude_shown": {}, "user": None, "history": []}, "user"),
        ({"discount_shown": {"by": 1}, "user": None, "history": []}, "user"),
        ({"shown_ids": ["x"], "user": None, "history": []}, "user"),
    ],
)
def test_bad_input_is_refused_by_name(service, fields, param):
    body = {"user": {"id": "ann"}, **fields}
    with pytest.raises(InvalidRequest) as refused:
        service.recommend({name: value for name, value in body.items() if value is not None})
    assert refused.value.param == param
    with pytest.raises((InvalidRequest, msgspec.ValidationError)):
        service.recommend(body)
