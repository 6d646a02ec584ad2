"""Several servers on one log of item changes: each takes changes, and all have one catalogue.

They may have two bundles, as while a rebuilt one is rolled out.
"""

import contextlib
import copy
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import redis
from msgspec import UNSET

from recserve.bundle.bundle import Bundle
from recserve.features.catalog.catalog_log import JournalError
from recserve.features.catalog.versions import VersionName, difference
from recserve.schemas.items import RecommendRequest, RollbackRequest
from recserve.server.context import MIN_VERSION_HEADER
from recserve.service import (
    Service,
    ServiceOptions,
    catalog_follower,
    live_catalog,
    version_archive,
)
from recserve.service.errors import (
    CatalogBehind,
    CatalogConflict,
    CatalogLost,
    UnknownItem,
    UnknownVersion,
)
from recserve.service.live_catalog import LiveCatalog
from recserve.service.options import CatalogLogOptions
from recserve.service.replacement import hand_over, open_successor
from tests.support.bundle_shelf import DROPPED, shelf
from tests.support.live_catalogues import base_of, item_like, lonely, put, scores, slate
from tests.support.live_server import live
from tests.support.redis_server import servers, start_sentinel, wait_for
from tests.support.tiny_bundle import shared_bundle

NAME = "shop"
MORE = range(1, 8)
REFUSED = (UnknownItem, UnknownVersion)


class Fleet:
    """Servers of one process that share a log in a real Redis."""

    def __init__(self, url, folder):
        self.url, self.folder = url, folder
        self.redis = redis.Redis.from_url(url)
        self.services = []
        self.keys = [f"recserve:items:{{{NAME}}}:{part}" for part in ("log", "snapshot", "epochs")]

    def open(self, bundle=None, **options):
        """Opens one more server, with a history store of its own."""
        bundle = shared_bundle() if bundle is None else bundle
        place = CatalogLogOptions(self.url, NAME, **options)
        store = f"lmdb:{self.folder}/store{len(self.services)}-{time.monotonic_ns()}"
        service = Service.open(bundle, store, "cpu", ServiceOptions(catalog_log=place))
        self.services.append(service)
        return service

    def restart(self, number):
        """Ends a server and starts it again."""
        old = self.services.pop(number)
        old.close()
        self.open(old.bundle.root)

    def copy(self):
        """Returns what a replica of Redis has now."""
        return [self.redis.dump(key) for key in self.keys[:2]]

    def lose(self, copy):
        """Makes another Redis take over that has an earlier log."""
        with self.redis.pipeline() as pipeline:
            for key, value in zip(self.keys, copy, strict=False):
                pipeline.delete(key)
                if value is not None:
                    pipeline.restore(key, 0, value)
            pipeline.hset(self.keys[2], "server", secrets.token_hex(8))
            pipeline.execute()

    def settle(self):
        """Waits until all servers have applied the whole log."""
        for service in self.services * 3:  # each bundle may assign what the other one has put
            service.catalog.catch_up()
        assert not any(one.catalog._pending for one in self.services)
        assert len({position(one) for one in self.services}) == 1

    def close(self):
        for service in self.services:
            service.close()
        self.redis.close()


@pytest.fixture
def fleet(redis_url, tmp_path, monkeypatch):
    monkeypatch.setattr(catalog_follower, "WAIT_S", 0.02)
    monkeypatch.setattr(catalog_follower, "PAUSE_S", 0.02)
    one = Fleet(redis_url, tmp_path)
    one.redis.flushall()
    yield one
    one.close()


def position(service):
    """Epoch and number of the version, which are those of all bundles."""
    return VersionName.parse(service.catalog.current.items.name)[1:]


def content(service):
    """Records, vectors and ids of all changed items, and what is visible."""
    items = service.catalog.current.items
    changed = difference(items)
    puts = {
        change.record.item_id: (
            change.record,
            None if change.vector is None else change.vector.tobytes(),
            None if change.codes is None else change.codes.tobytes(),
        )
        for change in changed.changes
        if change.record.item_id not in changed.hidden
    }
    return items.name, puts, set(changed.hidden)


def archived(service):
    """Names of the versions that a rollback can restore."""
    archive = service.catalog._archive
    return [*archive._older, *archive._newest]


def assert_equal(fleet):
    """Checks that all servers of each bundle agree. Returns the content of the last bundle."""
    fleet.settle()
    for version in {base_of(one).version for one in fleet.services}:
        services = [one for one in fleet.services if base_of(one).version == version]
        expected = assert_all_equal(services)
    return expected


def assert_all_equal(services):
    first, *others = services
    expected, slates = content(first), scores(slate(first))
    for other in others:
        assert content(other) == expected
        assert archived(other) == archived(first)
        # Other rows beside an item's own change the last bits of a matrix product.
        assert scores(slate(other)) == pytest.approx(slates, abs=1e-4)
    return expected


class Table:
    """The table of the page about retraining, for all bundles of a log.

    Attributes:
        built: Titles of each bundle's own items.
        live: Changed items of each bundle: title or None for the bundle's own, and whether it is
            hidden.
    """

    def __init__(self, catalogs):
        self.built = {
            one.version: dict(zip(one.items.ids, one.items.titles, strict=True)) for one in catalogs
        }
        self.live = {version: {} for version in self.built}

    def put(self, version, item_id, title):
        self.live[version][item_id] = title, False
        for other in self.others(version):
            self.take(other, item_id, title)

    def take(self, version, item_id, title):
        live = self.live[version]
        if item_id not in self.built[version]:
            live[item_id] = title, False
        elif live.get(item_id, (None, False))[1]:
            live[item_id] = live[item_id][0], False

    def hide(self, version, item_id):
        for each in self.live:
            live = self.live[each]
            live[item_id] = live.get(item_id, (None, False))[0], True

    def roll_back(self, version, restored):
        before, self.live[version] = self.live[version], dict(restored)
        for other in self.others(version):
            live = self.live[other]
            for item_id, (title, hidden) in restored.items():
                if hidden:
                    live[item_id] = live.get(item_id, (None, False))[0], True
                else:
                    known = self.built[version].get(item_id)
                    self.take(other, item_id, known if title is None else title)
            for item_id in before.keys() - restored.keys() & live.keys():
                live[item_id] = live[item_id][0], item_id not in self.built[other]

    def others(self, version):
        return [each for each in self.live if each != version]

    def shown(self, version):
        """Titles of the changed items that are visible."""
        built = self.built[version]
        return {
            item_id: built[item_id] if title is None else title
            for item_id, (title, hidden) in self.live[version].items()
            if not hidden
        }


class Draw:
    """Draws changes and faults of a fleet, and applies what was acknowledged to the table."""

    def __init__(self, fleet, bundles, seed, losses):
        self.fleet, self.losses = fleet, losses
        self.random = np.random.default_rng(seed)
        self.table = Table([Bundle.open(bundle).catalog() for bundle in bundles])
        self.versions = {version: {version: {}} for version in self.table.live}
        self.copies = [([None, None], copy.deepcopy(self.table.live))]

    def step(self, number):
        services = self.fleet.services
        service = services[self.random.integers(len(services))]
        kinds = ["put", "put", "put", "text", "move", "hide", "hide", "rollback"]
        kinds += ["restart", "condense", "pause", "lose" if self.losses else "pause"]
        kind = self.random.choice(kinds)
        if kind == "restart":
            self.fleet.restart(self.random.integers(len(services)))
        elif kind == "pause":  # or go on: it does not follow, so its next change meets a conflict
            paused = service.catalog.follower.catch_up != service.catalog.catch_up
            whole = self.random.random() < 0.5
            for one in services:
                if one is service or (whole and base_of(one).version == base_of(service).version):
                    resumed = one.catalog.catch_up if paused else lambda: time.sleep(0.01)
                    one.catalog.follower.catch_up = resumed
        elif kind == "condense":
            archive = service.catalog._archive
            names = [archive.oldest(recent=False).name, *archive._newest]
            version = archive.get(str(self.random.choice(names))).items
            if version.number:
                service.catalog._condense(version)
        elif kind == "lose" and self.random.random() < 0.5:
            del self.copies[self.random.integers(len(self.copies)) + 1 :]  # these are lost too
            stored, live = self.copies[-1]
            self.fleet.lose(stored)
            self.table.live = copy.deepcopy(live)
        elif kind == "lose":
            self.copies.append((self.fleet.copy(), copy.deepcopy(self.table.live)))
        else:
            with contextlib.suppress(*REFUSED):
                self.change(service, kind, number)

    def change(self, service, kind, number):
        version, table = base_of(service).version, self.table
        names = [f"new{number}" for number in range(12)]
        if len(self.versions) > 1:  # items of one bundle only, and of both
            names = names[:6] + [*DROPPED, "item000007", "item000008"]
        item_id = str(self.random.choice(names))
        like = int(self.random.integers(6))
        if kind == "hide":
            name = service.hide_item(item_id).catalog_version
            table.hide(version, item_id)
        elif kind == "rollback":
            wanted = str(self.random.choice(list(self.versions[version])))
            body = RollbackRequest(catalog_version=wanted)
            name = service.rollback_items(body).catalog_version
            table.roll_back(version, self.versions[version][wanted])
        else:
            body = item_like(service, item_id, like, title=f"rose {number}")
            if kind == "text":
                body = {"item_id": item_id, "title": f"rose {number}"}
            elif kind == "move":
                body = item_like(service, item_id, like + 1, title=f"rose {number}")
            name = put(service, body).catalog_version
            table.put(version, item_id, f"rose {number}")
        self.versions[version][name] = dict(table.live[version])


def shown(service, item_ids):
    """Titles of those of the items that are visible."""
    items = service.catalog.current.items
    rows = {item_id: items.visible.get(item_id) for item_id in item_ids}
    return {item_id: items.record(row).title for item_id, row in rows.items() if row >= 0}


@pytest.mark.parametrize("bundles", [["one"], ["one", "other"]])
@pytest.mark.parametrize("losses", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_all_servers_have_one_catalogue_whatever_happens(
    fleet, tmp_path, monkeypatch, seed, losses, bundles
):
    """Puts, hides, rollbacks, restarts, snapshots, paused followers; and losses of the log.

    The servers have one bundle or two.
    """
    monkeypatch.setattr(version_archive, "MAX_NEWEST", 6)
    monkeypatch.setattr(version_archive, "MIN_INTERVAL_S", 0.05)
    folder = shelf(tmp_path)
    bundles = [folder / bundle for bundle in bundles]
    drawn = Draw(fleet, bundles, seed, losses)
    later = 0 if seed % 2 else 25  # the second bundle's servers come now or later
    for number in range(60):
        for bundle in [bundles[0]] * 2 * (number == 0) + [*bundles, bundles[-1]] * (
            number == later
        ):
            fleet.open(bundle)
        drawn.step(number)
    conflicts = sum(one.catalog.follower.conflicts for one in fleet.services)
    for service in fleet.services:
        service.catalog.follower.catch_up = service.catalog.catch_up
    for bundle in bundles:
        fleet.open(bundle)
    assert_equal(fleet)
    for service in fleet.services:
        version = base_of(service).version
        assert shown(service, drawn.table.live[version]) == drawn.table.shown(version)
    if not losses:
        epoch, number = position(fleet.services[0])
        changes = sum(len(names) - 1 for names in drawn.versions.values())
        assert epoch and (number > changes if len(bundles) > 1 else number == changes)
        assert conflicts


@pytest.mark.parametrize("late", [True, False])
def test_a_bundle_takes_over_what_only_a_snapshot_of_another_bundle_has(fleet, tmp_path, late):
    """One that comes later, and one that was behind when the log was shortened."""
    folder = shelf(tmp_path)
    one = fleet.open(folder / "one")
    gone, back = "item000007", "item000008"
    one.hide_item(back)
    if not late:
        behind = fleet.open(folder / "other")
        fleet.settle()
        behind.catalog.follower.catch_up = lambda: time.sleep(0.01)
    put(one, item_like(one, "a", title="First"))
    before = one.hide_item(gone).catalog_version
    put(one, item_like(one, "b"), {"item_id": back, "title": "Shown again"})
    one.rollback_items(RollbackRequest(catalog_version=before))
    put(one, item_like(one, "c", title="Third"))
    one.catalog._condense(one.catalog.current.items)
    assert len(fleet.redis.xrange(fleet.keys[0])) == 1
    other = fleet.open(folder / "other") if late else behind
    fleet.settle()
    assert shown(other, ["a", "b", "c", gone, back]) == {"a": "First", "c": "Third"}
    assert_equal(fleet)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("bundles", [["one"], ["one", "other"]])
def test_a_hidden_item_whose_id_another_item_took_comes_back_with_its_fields(
    fleet, tmp_path, bundles, moved
):
    """Also on a server that began with a snapshot, and in each bundle."""
    folder = shelf(tmp_path)
    one, *others = [fleet.open(folder / bundle) for bundle in bundles]
    put(one, item_like(one, "a"))
    fleet.settle()
    code = one.item("a").semantic_id
    one.hide_item("a")
    put(one, item_like(one, "b"))
    assert one.item("b").semantic_id == code
    fleet.settle()
    if moved:
        put(one, item_like(one, "b", lonely(one) + 7))
        assert one.item("b").semantic_id != code
        fleet.settle()
    one.catalog._condense(one.catalog.current.items)
    for bundle in bundles:
        fleet.open(folder / bundle)
    late = fleet.services[-1]
    put(late, {"item_id": "a", "title": "Again"})
    fleet.settle()
    assert late.item("a").title == "Again"
    assert {tuple(service.item("a").categories) for service in fleet.services} == {("Care > Lips",)}
    assert_equal(fleet)


def test_servers_that_write_at_the_same_time_lose_no_change(fleet, monkeypatch):
    """Many put the same vector, so that they compete for semantic ids."""
    monkeypatch.setattr(live_catalog, "MAX_ATTEMPTS", 1000)
    services = [fleet.open() for _ in range(3)]
    like, failed = lonely(services[0]), []

    def write(name, service):
        try:
            for number in range(10):
                put(service, item_like(service, f"{name}{number}", like))
                put(service, {"item_id": "same", "title": f"{name}{number}"})
        except Exception as error:
            failed.append(error)

    threads = [
        threading.Thread(target=write, args=each) for each in zip("abc", services, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    name, puts, _ = assert_equal(fleet)
    assert name.endswith(".60") and len(puts) == 31
    assert len({codes for _, _, codes in puts.values()}) == 31


def test_a_server_that_is_never_fast_enough_says_so(fleet, monkeypatch):
    one, other = fleet.open(), fleet.open()
    one.catalog.follower.close()
    monkeypatch.setattr(one.catalog, "_catch_up", lambda: [])
    put(other, item_like(other, "a"))
    with pytest.raises(CatalogConflict, match="16 times"):
        put(one, item_like(one, "b"))


def test_vectors_of_a_put_are_made_once(fleet, monkeypatch):
    one, other = fleet.open(), fleet.open()
    one.catalog.follower.close()
    put(other, {"item_id": "a", "title": base_of(one).items.titles[0]})
    vectors, calls = one.catalog.open_tools()[0], []
    encode = type(vectors).of_text
    monkeypatch.setattr(type(vectors), "of_text", lambda *a: calls.append(1) or encode(*a))
    put(one, {"item_id": "b", "title": base_of(one).items.titles[0]})
    assert one.catalog.follower.conflicts == len(calls) == 1
    assert_equal(fleet)


@pytest.mark.parametrize("stored", [True, False])
def test_a_change_whose_reply_is_lost_is_made_once(fleet, stored):
    one, other = fleet.open(), fleet.open()
    log, replies = one.catalog.journal, []
    append = log._append

    def lost(*arguments):
        replies.append(1)
        if len(replies) > 1:
            return append(*arguments)
        if stored:
            append(*arguments)
            put(other, item_like(other, "b"))  # stands behind it
        raise redis.TimeoutError("the reply is lost")

    log._append = lost
    answer = put(one, item_like(one, "a"))
    assert answer.catalog_version.endswith(".1") and len(replies) == 1 + (not stored)
    assert content(one) == content(other) or assert_equal(fleet)


def test_an_acknowledged_change_is_seen_by_a_request_that_names_it(fleet):
    one, other = fleet.open(), fleet.open()
    follower = other.catalog.follower
    follower.catch_up = lambda: time.sleep(0.01)
    named = put(one, item_like(one, "a")).catalog_version
    history = base_of(one).items.ids[:3]
    body = RecommendRequest(history=history, min_catalog_version=named, timeout_ms=100)
    with pytest.raises(CatalogBehind, match="not arrived within the deadline"):
        other.recommend(body)
    timer = threading.Timer(0.1, lambda: setattr(follower, "catch_up", other.catalog.catch_up))
    timer.start()
    answer = slate(other, min_catalog_version=named)
    timer.join()
    assert answer.catalog_version == named and "a" in scores(answer)


def test_a_request_with_a_body_waits_for_the_version_of_its_header(fleet):
    one, other = fleet.open(), fleet.open()
    fleet.services.remove(other)  # it closes with its server
    put(one, item_like(one, "a"))
    body = {"items": [{"item_id": "b", "title": "Rose lipstick"}]}
    settings = {"catalog_log": fleet.url, "signing_key": "k" * 16}
    with live(other, **settings) as client, ThreadPoolExecutor(1) as pool:
        with other.catalog.pause_changes():
            headers = {MIN_VERSION_HEADER: put(one, item_like(one, "c")).catalog_version}
            answer = pool.submit(client.put, "/v1/items", json=body, headers=headers)
            wait_for(lambda: other.catalog.follower._awaited, "the request does not wait")
        assert answer.result().json()["catalog_version"].endswith(".3")


def test_a_swap_to_another_bundle_takes_the_changes_from_the_log(fleet, tmp_path):
    """Also those of a server that goes on with the old bundle, and a request waits for them."""
    folder = shelf(tmp_path)
    one, going_on = fleet.open(folder / "one"), fleet.open(folder / "one")
    put(one, item_like(one, "a", title="First"), {"item_id": DROPPED[0], "title": "Second"})
    place = CatalogLogOptions(fleet.url, NAME)
    other = Bundle.open(folder / "other")
    new = open_successor(one, other, "cpu", ServiceOptions(catalog_log=place))
    late = put(going_on, {"item_id": "item000007", "title": "Third"}, item_like(one, "b"))
    hand_over(one, new, lambda: None)
    fleet.services = [new, going_on]
    one.close()
    assert position(new) >= VersionName.parse(late.catalog_version)[1:]
    assert "b" in scores(slate(new, min_catalog_version=late.catalog_version))
    assert new.catalog.get("item000007").title == base_of(new).items.titles[5]
    assert new.catalog.get("a").title == "First" and new.catalog.get(DROPPED[0]).title == "Second"
    with new.catalog.pause_changes():
        hidden = going_on.hide_item("a").catalog_version
        reached = new.catalog.reaches(hidden)
        assert reached is not None and not reached.done()
    reached.result(10)
    with pytest.raises(UnknownItem):
        new.catalog.get("a")
    assert_equal(fleet)


@pytest.mark.parametrize("kept", [True, False])
def test_a_rollback_gives_the_previous_bundle_the_fields_of_later_changes(fleet, tmp_path, kept):
    """Those that were made in the newer bundle last, since this server switched to it."""
    folder = shelf(tmp_path)
    one, going_on = fleet.open(folder / "one"), fleet.open(folder / "one")
    newer = fleet.open(folder / "other")
    ids = [f"item{number:06d}" for number in (7, 8, 9, 10)]
    put(newer, {"item_id": ids[3], "title": "before the switch"})
    options = ServiceOptions(catalog_log=CatalogLogOptions(fleet.url, NAME))
    new = open_successor(one, Bundle.open(folder / "other"), "cpu", options)
    hand_over(one, new, lambda: None)
    fleet.services = [going_on, newer, new]
    put(newer, *({"item_id": each, "title": "newer", "price": 3.5} for each in ids[:3]))
    put(new, item_like(new, "a", title="First"))
    new.hide_item("item000011")
    fleet.settle()
    put(going_on, {"item_id": ids[1], "title": "later"})
    fleet.settle()
    if not kept:
        one.close()
        one = open_successor(new, Bundle.open(folder / "one"), "cpu", options)
    carried = hand_over(new, one, lambda: None, override=True)
    new.close()
    fleet.services = [going_on, newer, one]
    fleet.settle()
    titles = ["newer", "later", "newer", base_of(one).items.titles[10]]
    expected = {**dict(zip(ids, titles, strict=True)), "a": "First"}
    assert shown(going_on, [*ids, "a", "item000011"]) == expected and carried.put == 3
    assert going_on.item(ids[0]).attributes["price"] == 3.5
    assert_equal(fleet)


def test_another_bundle_of_the_same_embedding_length_uses_the_embedding(
    fleet, tmp_path, monkeypatch
):
    monkeypatch.setattr(LiveCatalog, "embedding_size", lambda self: 16)
    folder = shelf(tmp_path)
    one, other = fleet.open(folder / "one"), fleet.open(folder / "other")
    put(one, item_like(one, "a"))
    put(one, {"item_id": "a", "title": "Later"})
    put(one, {"item_id": DROPPED[0], "title": "Of one bundle"})
    late = fleet.open(folder / "other")
    fleet.settle()
    for service in (other, late):
        items, known = service.catalog.current.items, one.catalog.current.items
        for item_id in ("a", DROPPED[0]):
            row, expected = items.visible.get(item_id), known.visible.get(item_id)
            assert np.array_equal(items.vectors[row], known.vectors[expected])
        assert service.catalog.get("a").title == "Later"


def test_one_large_change_set_is_carried_over_in_parts(fleet, tmp_path, monkeypatch):
    monkeypatch.setattr(live_catalog, "MAX_ASSIGNED", 2)
    folder = shelf(tmp_path)
    one = fleet.open(folder / "one")
    put(one, *(item_like(one, f"new{number}") for number in range(5)))
    one.hide_item("item000007")
    other = fleet.open(folder / "other")
    assert position(other)[1] == 2 + 3 + 1
    assert shown(other, ["item000007", *(f"new{n}" for n in range(5))]).keys() == {
        f"new{number}" for number in range(5)
    }
    assert_equal(fleet)


def test_a_version_of_an_earlier_epoch_is_there_or_lost(fleet):
    one = fleet.open()
    kept = put(one, item_like(one, "a")).catalog_version
    copy = fleet.copy()
    gone = put(one, item_like(one, "b")).catalog_version
    fleet.lose(copy)
    one.catalog.catch_up()
    assert one.catalog.follower.losses == 1
    assert one.catalog.reaches(kept) is None
    with pytest.raises(CatalogLost, match="went on from position 1"):
        one.catalog.reaches(gone)
    later = put(one, item_like(one, "c"), item_like(one, "d")).catalog_version
    assert later.split(".")[2] == gone.split(".")[2] and later != gone
    assert one.catalog.reaches(kept) is one.catalog.reaches(later) is None
    with pytest.raises(CatalogLost):
        one.catalog.reaches(gone)
    assert one.catalog.reaches(f"{kept.split('.')[0]}.{later.split('.')[1]}.9") is not None


def test_without_redis_a_server_answers_and_says_so_and_catches_up(fleet):
    one, other = fleet.open(stale_ms=150), fleet.open()
    put(one, item_like(one, "a"))
    fleet.settle()
    log = one.catalog.journal
    script, waiting = log._read, log._waiting

    def unreachable(*_):
        raise redis.ConnectionError("cut off")

    log._read = log._append = unreachable
    log._waiting = redis.Redis(port=1)
    put(other, item_like(other, "b"))
    time.sleep(0.3)
    answer = slate(one)
    assert (
        "catalog_stale" in answer.degraded and "a" in scores(answer) and "b" not in scores(answer)
    )
    with pytest.raises(JournalError, match="cut off"):
        put(one, item_like(one, "c"))
    assert one.catalog.follower.counts().lag_s > 0.15
    log._read, log._waiting = script, waiting
    one.catalog.catch_up()
    answer = slate(one)
    assert "catalog_stale" not in answer.degraded and "b" in scores(answer)


def test_a_damaged_change_stops_a_server_where_it_is(fleet):
    one = fleet.open()
    put(one, item_like(one, "a"))
    epoch = one.catalog.current.items.epoch
    fleet.redis.xadd(fleet.keys[0], {"epoch": epoch, "time": 1, "writer": "x", "line": b"?"}, "2-0")
    with pytest.raises(JournalError, match="position 2 is damaged"):
        one.catalog.catch_up()
    assert "a" in scores(slate(one))
    with pytest.raises(JournalError, match="position 2 is damaged"):
        put(one, item_like(one, "b"))
    with pytest.raises(JournalError, match="position 2 is damaged"):
        fleet.open()


@pytest.mark.slow
def test_a_change_waits_for_replicas_of_redis_and_says_if_they_lack_it(tmp_path, redis_url):
    with servers() as started:
        sentinel, port = start_sentinel(tmp_path, started)
        with redis.Redis(port=port) as primary:
            wait_for(lambda: primary.info("replication")["slave0"]["state"] == "online", "no copy")
        fleet = Fleet(redis_url, tmp_path)
        fleet.url = f"redis+sentinel://{sentinel}/shop"
        one, strict = fleet.open(), fleet.open(wait_replicas=2)
        assert put(one, item_like(one, "a")).warning is UNSET
        assert "1 of 2 replicas" in put(strict, item_like(strict, "b")).warning
        assert_equal(fleet)
        fleet.close()
