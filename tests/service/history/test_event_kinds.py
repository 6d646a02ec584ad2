"""Positive, read and negative events: what they hide, what they count, what they train."""

import random
import time
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
import typer.testing

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.cli import app
from recserve.config import ConfigError, ServerConfig
from recserve.features.history import stores
from recserve.features.history.event_kinds import EventKinds
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.features.tables.parquet import BadRowError, SchemaError
from recserve.schemas.items import RecommendRequest
from recserve.schemas.shorthand import check_body
from recserve.server.loader import ServiceLoader
from recserve.service import Service, ServiceOptions
from tests.support.grids import covering
from tests.support.live_server import live
from tests.support.partial_stores import MemoryStore
from tests.support.tiny_bundle import every_strategy_bundle

NEGATIVE = ("hide", "dislike", "skip", "not_interested", "return of goods")
READ = ("view", "impression")
POSITIVE = ("click", "like", "purchase")
VALUES = {"rating": (0.5, 2.0, 2.5, 5.0)}
TYPES = (*NEGATIVE, *READ, *POSITIVE, *POSITIVE, "rating")
OWN = EventKinds(negative=("return of goods", "rating<2.5"), read=("view",))
STRATEGIES = ("auto", "beam", "speculative", "nezha", "dense", "popular", "latest")
K = 12


def kind_of(event):
    """The plain definition of a kind."""
    if event["type"] == "rating":
        return "negative" if event["value"] < 2.5 else "positive"
    if event["type"] in NEGATIVE:
        return "negative"
    return "read" if event["type"] in READ else "positive"


def judge(events):
    """Returns the events that the model reads, the hidden items and the items only seen."""
    hidden = set()
    for event in events:
        if kind_of(event) == "negative":
            hidden.add(event["item_id"])
        elif kind_of(event) == "positive":
            hidden.discard(event["item_id"])
    wanted = [
        event for event in events if kind_of(event) == "positive" and event["item_id"] not in hidden
    ]
    return wanted, hidden, {event["item_id"] for event in events if kind_of(event) == "read"}


def draw_events(draw, items, count):
    events = []
    for number in range(count):
        kind = draw.choice(TYPES)
        event = {"item_id": draw.choice(items), "type": kind, "event_id": f"e{number}"}
        value = {"value": draw.choice(VALUES[kind])} if kind in VALUES else {}
        events.append(event | value | {"timestamp": int(time.time()) - 60 + number})
    return events


def ask(door, service, client, body):
    """Returns the item ids of a slate through one door."""
    if door == "python":
        return [item.item_id for item in service.recommend(body).items]
    if door == "batch":
        (pending,) = service.recommender.begin_all([check_body(body, RecommendRequest)], "r")
        return [item.item_id for item in pending.wait().items]
    if door == "http":
        answer = client.post("/v1/recommend", json=body)
        assert answer.status_code == 200, answer.text
        return [item["item_id"] for item in answer.json()["items"]]
    inputs = [
        {"name": "user_id", "shape": [1], "datatype": "BYTES", "data": [body["user"]["id"]]},
        {"name": "k", "shape": [1], "datatype": "INT64", "data": [K]},
    ]
    parameters = {"strategy": body["strategy"], "exclude_seen": body["exclude"]["seen"]}
    sent = {"inputs": inputs, "parameters": parameters}
    answer = client.post("/v2/models/recommend/infer", json=sent)
    assert answer.status_code == 200, answer.text
    (found,) = [out for out in answer.json()["outputs"] if out["name"] == "item_id"]
    return found["data"]


def ranked(service, user_id, items):
    """Returns the scores of some candidates."""
    body = {"user": {"id": user_id}, "candidates": [{"item_id": item} for item in items]}
    return {item.item_id: item.score for item in service.rank(body).items}


@pytest.mark.parametrize(
    "store,door",
    covering(("lmdb", "redis", "memory"), ("python", "batch", "http", "infer")),
)
def test_a_slate_is_that_of_a_user_with_the_wanted_events(
    tmp_path, request, monkeypatch, store, door
):
    """Drawn events in every strategy, against a twin who has only the wanted ones."""
    url = f"lmdb:{tmp_path}/store"
    if store == "redis":
        url = request.getfixturevalue("redis_url")
        redis.Redis.from_url(url).flushall()
    elif store == "memory":
        memory = type(
            "Memory", (MemoryStore,), {"open": classmethod(lambda c, u, o: c()), "cap": 1024}
        )
        monkeypatch.setattr(stores, "store_class", lambda _: memory)
    draw = random.Random(f"{store} {door}")
    options = ServiceOptions(
        journal=tmp_path / "items", event_types=("not_interested", "impression"), event_kinds=OWN
    )
    service = Service.open(every_strategy_bundle(), url, "cpu", options)
    items = service.samples(1, 20)["items"]
    before = {item: service.item(item).popularity for item in items}
    counts = Counter()
    with live(service) as client:
        for number, strategy in enumerate(STRATEGIES * 2):
            events = draw_events(draw, items, draw.randrange(1, 15))
            twin, hidden, read = judge(events)
            user = {"user_id": f"u{number}"}
            # Warm prefixes from before the last events must not matter.
            for part in (events[: len(events) // 2], events[len(events) // 2 :]):
                sent = {"events": [user | event for event in part], "warm": True}
                if part:
                    assert service.add_events(sent).rejected == []
            counts.update(e["item_id"] for e in events if kind_of(e) == "positive")
            if twin:
                theirs = [{"user_id": f"t{number}"} | event for event in twin]
                assert service.add_events({"events": theirs}).accepted == len(twin)
                counts.update(event["item_id"] for event in twin)
            seen = draw.random() < 0.7
            body = {"k": K, "strategy": strategy, "exclude": {"seen": seen}}
            away = sorted(hidden | (read if seen else set()))
            expected = service.recommend(
                body | {"user": {"id": f"t{number}"}, "exclude": {"seen": seen, "item_ids": away}}
            )
            found = ask(door, service, client, body | {"user": {"id": f"u{number}"}})
            assert found == [item.item_id for item in expected.items], (strategy, events)
            assert not hidden & set(found)
            theirs = ranked(service, f"t{number}", items)
            assert ranked(service, f"u{number}", items) == pytest.approx(theirs, abs=1e-3)
        after = {item: service.item(item).popularity for item in items}
        gained = {item: round(after[item] - before[item]) for item in items}
        assert gained == {item: counts[item] for item in items}


def test_the_newest_event_decides_and_removing_it_restores(tmp_path):
    """Hide, like, hide, and then each of them is removed."""
    with Service.open(every_strategy_bundle(), f"lmdb:{tmp_path}/store", "cpu") as service:
        first, second = service.samples(1, 2)["items"]

        def send(kind, event_id, **fields):
            event = {"user_id": "ann", "item_id": first, "type": kind, "event_id": event_id}
            assert service.add_events({"events": [event | fields]}).rejected == []
            body = {"user": {"id": "ann"}, "strategy": "popular", "k": 2}
            answer = service.recommend(body | {"exclude": {"seen": False}})
            return first in [item.item_id for item in answer.items]

        assert not send("hide", "1") and send("like", "2") and not send("hide", "3")
        assert not send("view", "old", timestamp="2026-01-01T00:00:00Z")
        assert send("hide", "3", correction="remove")
        assert not send("hide", "2", correction="replace")
        assert not send("like", "2", correction="remove")
        assert send("hide", "1", correction="remove")
        answer = service.recommend({"user": {"id": "bob"}, "k": 2})
        assert answer.degraded == ["cold_start"] and second in [i.item_id for i in answer.items]
        # Nothing of a user's earlier prefixes stays, hidden items included.
        send("click", "4")
        service.recommend({"user": {"id": "ann"}, "strategy": "beam", "k": 2})
        send("hide", "5")
        service.delete_user("ann")
        body = {"history": [first], "strategy": "beam", "k": 2, "explain": True}
        assert service.recommend(body).explanation.root_tokens_cached == 0


def typed_files(folder, draw):
    """Writes synthetic events with drawn types and values."""
    files = write_synthetic(folder, SyntheticOptions(500, 40, 16, seed=3))
    table = pq.read_table(files.events)
    types = [draw.choice(TYPES) for _ in range(table.num_rows)]
    values = [draw.choice(VALUES.get(kind, (1.0,))) for kind in types]
    for name, column in (("type", pa.array(types)), ("value", pa.array(values, pa.float32()))):
        if name in table.column_names:
            table = table.drop_columns(name)
        table = table.append_column(name, column)
    pq.write_table(table, files.events)
    return files, table


def test_a_bundle_trains_and_counts_positive_events_only(tmp_path):
    """A bundle with all events has the vectors, counts and training events of the positive ones."""
    draw = random.Random(3)
    files, table = typed_files(tmp_path / "all", draw)
    rows = [kind_of(event) == "positive" for event in table.to_pylist()]
    wanted, _ = typed_files(tmp_path / "wanted", draw)
    pq.write_table(table.filter(pa.array(rows)), wanted.events)
    lines, bundles = [], {}
    flags = ["--read", "view", "--negative", "return of goods", "--negative", "rating<2.5"]
    for name, one in (("all", files), ("wanted", wanted)):
        out = tmp_path / f"{name}.bundle"
        inputs = ["--items", str(one.items), "--events", str(one.events), "--out", str(out)]
        done = typer.testing.CliRunner().invoke(app, ["build", *inputs, *flags])
        assert done.exit_code == 0, done.output
        lines.append(done.output)
        bundles[name] = Bundle.open(out)
    every, alone = bundles["all"], bundles["wanted"]
    assert (every.catalog().popularity == alone.catalog().popularity).all()
    assert (every.catalog().vectors == alone.catalog().vectors).all()
    for name in ("user_ids", "offsets", "item_rows", "times", "types", "type_names", "values"):
        assert np.array_equal(getattr(every.events(), name), getattr(alone.events(), name)), name
    counts = Counter((event["type"], kind_of(event)) for event in table.to_pylist())
    for (kind, of), count in counts.items():
        assert any(
            f"event type {kind}:" in line and f"{count} {of}" in line
            for line in lines[0].splitlines()
        ), (kind, of)
    # The store gets all of them, with the kinds of the build, unless a setting says otherwise.
    user = next(iter(every.all_events().user_ids))
    events = [e for e in table.to_pylist() if e["user_id"] == user]
    for kinds, name in (((), "build"), (("skip", "hide"), "settings")):
        config = ServerConfig.load(
            {"bundle": every.root, "store": f"lmdb:{tmp_path}/{name}", "device": "cpu"}
            | {"positive_types": kinds, "journal": tmp_path / name / "items"}
        )
        with ServiceLoader(config).first() as service:
            assert len(service.history(user).events) == len(events)
            said = service.event_types()
            assert said.kinds["view"] == "read" and said.negative_below == {"rating": 2.5}
            assert said.kinds["hide"] == ("positive" if kinds else "negative")
            now = [e | {"type": "click"} if e["type"] in kinds else e for e in events]
            hidden = judge(now)[1]
            answer = service.recommend(
                {"user": {"id": user}, "strategy": "popular", "k": 1000}
                | {"exclude": {"seen": False}}
            )
            assert {e["item_id"] for e in events} - {i.item_id for i in answer.items} == hidden
            event = {"user_id": "ann", "item_id": events[0]["item_id"], "type": "rating"}
            (refused,) = service.add_events({"events": [event]}).rejected
            assert "value: is required for type 'rating'" in refused.reason


@pytest.mark.parametrize(
    "flags,message",
    [
        ({"negative": ("a",), "positive": ("a",)}, "'a' is both positive and negative"),
        ({"negative": ("rating<2", "rating")}, "named twice as negative"),
        ({"negative": ("rating<nan",)}, "expected a finite number"),
        ({"read": (" ",)}, "is blank"),
    ],
)
def test_kinds_that_contradict_each_other_are_refused(tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        EventKinds(**flags)
    named = {f"{kind}_types": names for kind, names in flags.items()}
    with pytest.raises(ConfigError, match=message):
        ServerConfig.load({"bundle": tmp_path} | named)


def test_a_build_names_what_it_cannot_train_on(tmp_path):
    files, table = typed_files(tmp_path / "data", random.Random(1))
    values = table.column("value").to_pylist()
    holes = pa.array([None if n == 5 else v for n, v in enumerate(values)], pa.float32())
    types = pa.array(["rating"] * table.num_rows)
    for column, value in (("value", holes), ("type", types)):
        table = table.drop_columns(column).append_column(column, value)
    pq.write_table(table, files.events)
    for kinds, error, message in (
        (EventKinds(negative=("rating<2",)), BadRowError, "need a value"),
        (EventKinds(negative=("rating",)), SchemaError, "--positive TYPE"),
    ):
        options = BuildOptions(files.items, files.events, tmp_path / "out", event_kinds=kinds)
        with pytest.raises(error, match=message):
            build_bundle(options, log=lambda _: None)
