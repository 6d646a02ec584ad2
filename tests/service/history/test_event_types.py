"""Names of event types: which are accepted, what number a store gives them, what reads them."""

import json
import random
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import redis
import torch
import typer.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from recserve.bundle.bundle import Bundle
from recserve.cli import app
from recserve.config import ConfigError, ServerConfig
from recserve.features.history.history import (
    CorruptHistory,
    StoredEvent,
    StoredUsers,
    mark_id,
    pack_marks,
)
from recserve.features.history.lmdb_store import MARKS, LmdbStore
from recserve.features.history.redis_store import RedisStore
from recserve.features.history.stores import open_store
from recserve.features.history.type_names import (
    EVENT_TYPES,
    MAX_EVENT_TYPES,
    MAX_TYPE_BYTES,
    check_type_names,
)
from recserve.features.ranking.event_features import EventColumns
from recserve.features.ranking.ranking import candidate_columns, prefix_columns
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.tables.parquet import BadRowError, SchemaError
from recserve.models.ranker import load_ranker, save_ranker
from recserve.server.loader import ServiceLoader
from recserve.service import Service, ServiceOptions
from recserve.service.event_types import TYPE_TABLE, EventTypes
from recserve.service.histories import IMPORT_MARKER, _read_imports
from recserve.service.replacement import open_successor
from recserve.training.ranker.ranking_batch import pack
from recserve.training.ranker.ranking_quality import attend_within
from tests.support.grids import covering
from tests.support.live_server import live
from tests.support.partial_stores import MemoryStore
from tests.support.tiny_bundle import built, shared_bundle
from tests.support.typed_bundles import typed_bundle, write_events

FURTHER = MAX_EVENT_TYPES - len(EVENT_TYPES)
NAME = st.one_of(
    st.sampled_from(EVENT_TYPES),
    st.text(min_size=1, max_size=MAX_TYPE_BYTES // 4).filter(
        lambda name: name.strip() and not any("\ud800" <= c <= "\udfff" for c in name)
    ),
)
NAMES = st.lists(NAME, max_size=12)
# Awkward names that every door must pass on unchanged.
AWKWARD = (
    "add to wishlist",
    " buy",
    "buy ",
    "Kauf,🛒",
    "купить",
    "a\0b\n",
    "[red]x[/red]",
    "x" * 64,
)


class RoomyStore(MemoryStore):
    """With room for the table of all types."""

    cap = 1024


@pytest.fixture(params=["lmdb", "expiring", "redis", "memory"])
def store(request, tmp_path):
    if request.param == "memory":
        yield RoomyStore()
        return
    url = f"lmdb:{tmp_path}/own{'?ttl_s=60' if request.param == 'expiring' else ''}"
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        redis.Redis.from_url(url).flushall()
    opened = open_store(url)
    yield opened
    opened.close()


def numbers(types):
    return {name: types.number(name) for name in types.known}


@settings(max_examples=60, deadline=None)
@given(st.lists(NAMES, min_size=2, max_size=4))
def test_servers_of_a_store_read_the_same_names(groups):
    """Each server adds its names, in any order, and reads those of all others."""
    store = RoomyStore()
    servers = [EventTypes(store) for _ in groups]
    for types, names in zip(servers, groups, strict=True):
        types.add(names)
    later = EventTypes(store)
    given_away = {}
    for types, names in zip(servers, groups, strict=True):
        assert set(types.known) == {*EVENT_TYPES, *names}
        given_away |= numbers(types)
    assert sorted(given_away.values()) == list(range(len(given_away)))
    assert [given_away[name] for name in EVENT_TYPES] == list(range(14))
    for types in (*servers, later):
        assert types.names(np.array(list(given_away.values()))) == list(given_away)


def test_every_store_holds_255_names_and_refuses_the_next(store):
    longest = [f"{n:03d}" + "ü" * 30 for n in range(FURTHER)]
    types = EventTypes(store)
    types.add(longest[:100])
    types.add([*longest, "click"])
    assert len(types.known) == MAX_EVENT_TYPES
    every = np.arange(MAX_EVENT_TYPES)
    assert EventTypes(store).names(every) == [*EVENT_TYPES, *longest]
    other = EventTypes(store)
    with pytest.raises(
        ValueError, match=r"255 event types of at most 255, and no room for 'one mo"
    ):
        other.add(["one more", longest[0]])
    assert other.known == EVENT_TYPES
    with pytest.raises(CorruptHistory, match="type number 255"):
        other.names(np.array([0, 255]))


def test_names_that_are_added_at_once_get_one_number_each(store):
    groups = [[f"{n}-{i}" for i in range(12)] + ["all of them"] for n in range(6)]
    servers = [EventTypes(store) for _ in groups]
    start = threading.Barrier(len(groups))

    def add(types, names):
        start.wait()
        for first in range(0, len(names), 4):
            types.add(names[first : first + 4])

    threads = [
        threading.Thread(target=add, args=each) for each in zip(servers, groups, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    given_away = {}
    for types in servers:
        own = numbers(types)
        assert all(given_away.get(name, number) == number for name, number in own.items())
        given_away |= own
    assert sorted(given_away.values()) == list(range(14 + 6 * 12 + 1))


def test_a_damaged_table_is_never_extended(store):
    types = EventTypes(store)
    types.add(["one"])
    damage_marks(store)
    for _ in range(2):
        with pytest.raises(CorruptHistory, match="marks event-types"):
            EventTypes(store).add(["two"])


def damage_marks(store):
    """Breaks the marks of event types where the store has them."""
    inner = getattr(store, "store", store)
    if isinstance(inner, LmdbStore):
        with inner._environment.begin(write=True) as transaction:
            transaction.put(MARKS + b"event-types", b'["one')
    elif isinstance(inner, RedisStore):
        inner._client.set("recserve:marks:event-types", "one")
    else:
        user = mark_id("marks-event-types")
        events = store.get(user)
        store.delete(user)
        store.append(
            user, [StoredEvent(int(e["item_key"]), 0, int(e["event_key"])) for e in events[1:]]
        )


@pytest.mark.parametrize("seed", range(5))
def test_stores_of_earlier_versions_are_read(store, seed):
    """Their names and imports were histories of pseudo-users, which are gone then."""
    drawn = random.Random(seed)
    names = drawn.sample([f"type {n}" for n in range(50)], drawn.randint(1, 30))
    imports = [drawn.getrandbits(64) for _ in range(drawn.randint(1, 4))]
    store.append(TYPE_TABLE, pack_marks(len(EVENT_TYPES), names))
    store.append(IMPORT_MARKER, [StoredEvent(key, 0, key) for key in imports])
    store.append("ann", [StoredEvent(1, 5, 7, len(EVENT_TYPES))])
    types = EventTypes(store)
    types.add([drawn.choice(names), "new"])
    assert types.names(np.arange(14 + len(names) + 1)) == [*EVENT_TYPES, *names, "new"]
    assert EventTypes(store).names(store.get("ann")["type"]) == names[:1]
    assert sorted(int(mark, 16) for mark in _read_imports(store)) == sorted(set(imports))
    for old in (TYPE_TABLE, IMPORT_MARKER):
        assert not store.get(old).size
    if isinstance(getattr(store, "store", store), LmdbStore | RedisStore):
        assert store.users("", 10, None) == StoredUsers(["ann"], None)  # marks are no users


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([""], "'' is blank"),
        ([" \t"], "is blank"),
        (["ü" * 33], "has 66 bytes of UTF-8; at most 64"),
        ([f"t{n:03d}" for n in range(FURTHER + 1)], "242 event types.*at most 241, which 't241'"),
        (["\ud800"], "not valid text"),
    ],
    ids=["empty", "blank", "long", "256", "surrogate"],
)
def test_names_out_of_bounds_are_refused_by_name_at_every_door(tmp_path, names, message):
    with pytest.raises(ValueError, match=message):
        check_type_names(names)
    with pytest.raises(ConfigError, match="event_types: .*" + message):
        ServerConfig.load({"bundle": shared_bundle(), "event_types": names})
    with pytest.raises(ValueError, match=message):
        EventTypes(RoomyStore()).add(names)
    if names == ["\ud800"]:
        return  # Parquet has none
    place = "column type: .*" if len(names) > 1 else "column type, row [0-9]+: .*"
    with pytest.raises((SchemaError, BadRowError), match=place + message):
        built(write_events(tmp_path / "data", names), tmp_path / "bundle")


def test_a_full_bundle_keeps_each_type(tmp_path):
    names = [f"t{n:03d}" for n in range(FURTHER)]
    bundle = typed_bundle(tmp_path, names)
    with Service.open(bundle, f"lmdb:{tmp_path}/store", "cpu") as service:
        assert service.event_types().event_types == [*EVENT_TYPES, *names]
        assert_imported(service, bundle)


def assert_imported(service, bundle):
    """The store has the events of the bundle with their types."""
    events = Bundle.open(bundle).all_events()
    for user, user_id in enumerate(events.user_ids):
        part = slice(*events.offsets[user : user + 2])
        expected = [events.type_names[number] for number in events.types[part]]
        assert [event.type for event in service.history(user_id).events] == expected


def test_every_door_passes_names_on_unchanged(tmp_path):
    """Build, import, settings, HTTP, corrections, restart, command line."""
    draw = random.Random(7)
    drawn = [f"{draw.choice('aéж日🛒')}{draw.random()}" for _ in range(6)]
    trained, configured = [*AWKWARD[:4], *drawn[:3], "click"], [*AWKWARD[4:], *drawn[3:], "view"]
    bundle, url = typed_bundle(tmp_path, [*trained, None]), f"lmdb:{tmp_path}/store"
    known = [*EVENT_TYPES, *sorted({*trained, *configured} - set(EVENT_TYPES))]
    config = ServerConfig.load(
        {"bundle": bundle, "store": url, "event_types": configured, "device": "cpu"}
    )
    service = ServiceLoader(config).first()
    item = service.samples(1, 1)["items"][0]
    assert_imported(service, bundle)
    with live(service) as client:
        assert client.get("/v1/event-types").json()["event_types"] == known
        event = {"user_id": "ann", "item_id": item}
        sent = [event | {"type": name, "event_id": f"e{n}"} for n, name in enumerate(known)]
        answer = client.post("/v1/events", json={"events": sent}).json()
        assert (answer["accepted"], answer["rejected"]) == (len(known), [])
        stored = client.get("/v1/users/ann/history").json()["events"]
        assert [one["type"] for one in stored] == known
        change = [sent[0] | {"type": known[-1], "correction": "replace"}]
        assert client.post("/v1/events", json={"events": change}).json()["corrected"] == 1
        unknown = {"events": [event | {"type": "add to wishlits"}, event | {"type": ""}, event]}
        answer = client.post("/v1/events", json=unknown).json()
        assert answer["accepted"] == 1 and [one["index"] for one in answer["rejected"]] == [0, 1]
        reason = answer["rejected"][0]["reason"]
        assert reason.startswith("type is 'add to wishlits'; expected one of add to wishlist, ")
        assert f"and {len(known) - 20} more, see GET /v1/event-types" in reason
        users = client.get("/v1/users", params={"prefix": "rec"}).json()
        assert users == {"users": [], "next": None}
        schema = client.get("/openapi.json").json()["components"]["schemas"]["EventInput"]
        assert "enum" not in json.dumps(schema["properties"]["type"])
    # Without the settings, the command line still reads what the store holds.
    place = ["--bundle", str(bundle), "--store", url, "--json"]
    done = typer.testing.CliRunner().invoke(app, ["history", "show", "ann", *place])
    assert done.exit_code == 0, done.output
    shown = [one["type"] for one in json.loads(done.stdout)["events"]]
    assert shown == [known[-1], *known[1:], "event"]
    with Service.open(bundle, url, "cpu") as again:
        assert_imported(again, bundle)
        wrong = again.add_events({"events": [event | {"type": configured[0]}]})
        assert wrong.rejected[0].reason.startswith(f"type is {configured[0]!r}; expected one of ")


@pytest.mark.parametrize(
    "new_first,kind", covering({"new first": True, "old first": False}, ("lmdb", "redis"))
)
def test_two_servers_with_different_bundles_share_a_store(tmp_path, request, kind, new_first):
    """LMDB opens once per process, so there the servers take turns; over Redis both are up."""
    url = f"lmdb:{tmp_path}/store"
    if kind == "redis":
        url = request.getfixturevalue("redis_url")
        redis.Redis.from_url(url).flushall()
    sets = {"old": ("click", "mid", "zap"), "new": ("click", "added", "mid", "zap", "zoom")}
    bundles = {
        name: typed_bundle(tmp_path / name, names, ranker=True) for name, names in sets.items()
    }
    order = ["new", "old"] if new_first else ["old", "new"]
    sent = []
    with ExitStack() as stack:
        up = {}

        def service_of(name):
            if kind == "redis" and name in up:
                return up[name]
            if kind == "lmdb":
                stack.close()
            options = ServiceOptions(journal=tmp_path / "items" / name)
            up[name] = stack.enter_context(Service.open(bundles[name], url, "cpu", options))
            return up[name]

        for name in order * 2:
            service = service_of(name)
            item = service.samples(1, 1)["items"][0]
            for kind_of in sets[name]:
                event = {"user_id": "ann", "item_id": item, "type": kind_of}
                assert service.add_events({"events": [event]}).accepted == 1
                sent.append(kind_of)
            refused = {"user_id": "ann", "item_id": item, "type": "zoom"}
            if name == "old":
                assert service.add_events({"events": [refused]}).accepted == 0
        for name in order:
            service = service_of(name)
            assert [event.type for event in service.history("ann").events] == sent
            item = service.samples(1, 1)["items"][0]
            request_body = {"user": {"id": "ann"}, "candidates": [{"item_id": item}]}
            assert service.rank(request_body).degraded == []
            assert_imported(service, bundles["new" if new_first else "old"])


def test_a_successor_brings_its_types_and_the_old_service_reads_them(tmp_path):
    old_bundle = typed_bundle(tmp_path / "old", ("click", "zap"))
    new_bundle = typed_bundle(tmp_path / "new", ("added", "click", "zap"))
    with Service.open(old_bundle, f"lmdb:{tmp_path}/store", "cpu") as old:
        item = old.samples(1, 1)["items"][0]
        event = {"user_id": "ann", "item_id": item, "type": "added"}
        with open_successor(old, Bundle.open(new_bundle), "cpu") as new:
            assert new.event_types().event_types == [*EVENT_TYPES, "added", "zap"]
            assert new.add_events({"events": [event]}).accepted == 1
            for service in (old, new):
                assert [event.type for event in service.history("ann").events] == ["added"]
        assert old.add_events({"events": [event]}).accepted == 0
        assert old.event_types().event_types == [*EVENT_TYPES, "zap"]


def test_a_trained_type_is_served_as_it_was_trained(tmp_path):
    """The scores of a user's imported events equal those of the evaluation, which reads the log."""
    bundle = typed_bundle(tmp_path, ("wish", "purchase", "смотреть"), ranker=True)
    opened = Bundle.open(bundle)
    catalog, events = opened.catalog(), opened.events()
    tables = RankingTables.load(opened.directory("ranker"), catalog.items, catalog.vectors)
    vectors = torch.from_numpy(catalog.vectors)
    folder = opened.directory("ranker")
    model = load_ranker(folder, vectors)
    model.type_embedding.weight.data.mul_(20)  # so that a type shows in the score
    save_ranker(model, folder)
    opened.commit("ranker", {})
    rows = np.arange(6)

    def evaluate(columns):
        root = prefix_columns(tables, columns)
        part = candidate_columns(tables, root, rows)
        labels = np.zeros((rows.size, 2), np.float32)
        batch = pack([root], part.columns, part.prefix_limits, np.array([rows.size]), labels)
        with torch.no_grad():
            inputs = batch.inputs
            hidden = model(model.embed(inputs), inputs.groups, attend_within(model, batch))
            return model.heads(hidden.flatten(0, 1)[batch.candidates]).sigmoid().numpy()

    differences = []
    with Service.open(bundle, f"lmdb:{tmp_path}/store", "cpu") as service:
        for user in range(8):
            columns = EventColumns.of(events, user)
            expected = evaluate(columns)
            untyped = EventColumns(
                columns.rows, columns.times, columns.types * 0 - 1, columns.values
            )
            differences.append(abs(expected - evaluate(untyped)).max())
            answer = service.rank(
                {
                    "user": {"id": events.user_ids[user]},
                    "candidates": [{"item_id": catalog.items.ids[row]} for row in rows],
                }
            )
            found = {item.item_id: list(item.scores.values()) for item in answer.items}
            served = np.array([found[catalog.items.ids[row]] for row in rows])
            np.testing.assert_allclose(served, expected, atol=1e-5)
    assert min(differences) > 1e-3
