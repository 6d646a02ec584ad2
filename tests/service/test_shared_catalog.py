"""Several servers on one log of item changes: each takes changes, and all have one catalogue."""

import contextlib
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import redis
from msgspec import UNSET

from recserve.features.catalog.catalog_log import JournalError
from recserve.features.catalog.versions import difference
from recserve.schemas.items import RecommendRequest, RollbackRequest
from recserve.server.context import MIN_VERSION_HEADER
from recserve.service import Service, ServiceOptions, catalog_follower, live_catalog
from recserve.service.errors import (
    CatalogBehind,
    CatalogConflict,
    CatalogLost,
    UnknownItem,
    UnknownVersion,
)
from recserve.service.options import CatalogLogOptions
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

    def open(self, **options):
        """Opens one more server, with a history store of its own."""
        place = CatalogLogOptions(self.url, NAME, **options)
        store = f"lmdb:{self.folder}/store{len(self.services)}-{time.monotonic_ns()}"
        service = Service.open(shared_bundle(), store, "cpu", ServiceOptions(catalog_log=place))
        self.services.append(service)
        return service

    def restart(self, number):
        """Ends a server and starts it again."""
        old = self.services.pop(number)
        old.close()
        self.open()

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
        for service in self.services:
            service.catalog.catch_up()
        assert len({one.catalog.current.items.name for one in self.services}) == 1

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
    fleet.settle()
    first, *others = fleet.services
    expected, slates = content(first), scores(slate(first))
    for other in others:
        assert content(other) == expected
        assert archived(other) == archived(first)
        # Other rows beside an item's own change the last bits of a matrix product.
        assert scores(slate(other)) == pytest.approx(slates, abs=1e-4)
    return expected


class Draw:
    """Draws changes and faults of a fleet, and remembers what was acknowledged."""

    def __init__(self, fleet, seed, losses):
        self.fleet, self.losses = fleet, losses
        self.random = np.random.default_rng(seed)
        self.shown = {}  # title of each live item
        self.versions = {base_of(fleet.services[0]).version: {}}
        self.copies = [[None, None]]

    def step(self, number):
        services = self.fleet.services
        service = services[self.random.integers(len(services))]
        kinds = ["put", "put", "put", "text", "move", "hide", "hide", "rollback"]
        kinds += ["restart", "condense", "pause", "lose" if self.losses else "pause"]
        kind = self.random.choice(kinds)
        if kind == "restart":
            self.fleet.restart(self.random.integers(len(services)))
        elif kind == "pause":  # or go on: it does not follow, so its next change meets a conflict
            follower = service.catalog.follower
            paused = follower.catch_up != service.catalog.catch_up
            follower.catch_up = service.catalog.catch_up if paused else lambda: time.sleep(0.01)
        elif kind == "condense":
            version = service.catalog._archive.oldest(recent=bool(self.random.integers(2)))
            if version.number:
                service.catalog._condense(version)
        elif kind == "lose" and self.random.random() < 0.5:
            self.fleet.lose(self.copies[self.random.integers(len(self.copies))])
        elif kind == "lose":
            self.copies.append(self.fleet.copy())
        else:
            with contextlib.suppress(*REFUSED):
                self.change(service, kind, number)

    def change(self, service, kind, number):
        shown = dict(self.shown)
        item_id = f"new{self.random.integers(12)}"
        like = int(self.random.integers(6))
        if kind == "hide":
            name = service.hide_item(item_id).catalog_version
            shown.pop(item_id)
        elif kind == "rollback":
            wanted = str(self.random.choice(list(self.versions)))
            body = RollbackRequest(catalog_version=wanted)
            name = service.rollback_items(body).catalog_version
            shown = self.versions[wanted]
        else:
            body = item_like(service, item_id, like, title=f"rose {number}")
            if kind == "text":
                body = {"item_id": item_id, "title": f"rose {number}"}
            elif kind == "move":
                body = item_like(service, item_id, like + 1, title=f"rose {number}")
            name = put(service, body).catalog_version
            shown[item_id] = f"rose {number}"
        self.versions[name] = self.shown = shown


@pytest.mark.parametrize("losses", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_all_servers_have_one_catalogue_whatever_happens(fleet, monkeypatch, seed, losses):
    """Puts, hides, rollbacks, restarts, snapshots, paused followers; and losses of the log."""
    monkeypatch.setattr(live_catalog, "MAX_NEWEST", 6)
    monkeypatch.setattr(live_catalog, "MIN_INTERVAL_S", 0.05)
    for _ in range(3):
        fleet.open()
    drawn = Draw(fleet, seed, losses)
    for number in range(60):
        drawn.step(number)
    conflicts = sum(one.catalog.follower.conflicts for one in fleet.services)
    for service in fleet.services:
        service.catalog.follower.catch_up = service.catalog.catch_up
    fleet.open()
    name, puts, hidden = assert_equal(fleet)
    if not losses:
        found = {item_id: record.title for item_id, (record, *_) in puts.items()}
        assert found == drawn.shown and conflicts
        assert hidden.isdisjoint(drawn.shown)
        bundle, epoch, number = name.split(".")
        assert int(number) == len(drawn.versions) - 1 and int(epoch)


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
