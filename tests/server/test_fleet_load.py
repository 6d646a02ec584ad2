"""One request loads a bundle on all servers of a catalogue, one after another, or on none."""

import secrets
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
import redis

from recserve.config import ServerConfig
from recserve.features.catalog import fleet
from recserve.features.catalog.fleet import FleetDirectory, Replica, Rollout
from recserve.features.redis_connection import connect
from recserve.server import heartbeat
from recserve.service.replacement import UnfitBundle
from tests.server.test_bundle_swap import ADMIN, KEY, begin, ended
from tests.support.bundle_shelf import shelf
from tests.support.live_server import run_server
from tests.support.redis_server import wait_for

SERVERS = 3


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    return shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def servers(bundles, tmp_path_factory, redis_url):
    folder = tmp_path_factory.mktemp("fleet")
    redis.Redis.from_url(redis_url).flushall()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(heartbeat, "EVERY_S", 0.05)
        yield [
            stack.enter_context(
                run_server(
                    ServerConfig(
                        bundle=bundles / "one",
                        bundles_dir=bundles,
                        store=redis_url,
                        catalog_log="redis",
                        signing_key="a-key-of-sixteen",
                        admin_keys=[KEY],
                        experiments_dir=folder / str(number),
                        port=number,
                        device="cpu",
                        kv_bytes=2**22,
                    )
                )
            )
            for number in range(1, SERVERS + 1)
        ]


@pytest.fixture(autouse=True)
def at_start(servers):
    """All servers have the bundle `one` and no load in progress."""
    yield
    for server in servers:
        settled(server)
        if serves(server)["path"] != "one":
            assert begin(server, "one").status_code == 202
            assert ended(server)["state"] == "ready"


def serves(server):
    return server.get("/admin/bundle", headers=ADMIN).json()["current"]


def load_all(server, name, **options):
    body = {"path": name, "fleet": True, **options}
    return server.post("/admin/bundle:load", json=body, headers=ADMIN)


def settled(server):
    """Waits for the end of the load of the fleet; returns what the server says of it."""
    end = time.monotonic() + 90
    while True:
        found = server.get("/admin/bundle", headers=ADMIN).json().get("fleet")
        if found is None or found["state"] not in ("loading", "returning"):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.02)


def lifecycles(servers):
    return [server.app.state.lifecycle for server in servers]


def test_all_load_it_one_after_another_and_are_ready_before_the_next(servers, monkeypatch):
    """Whichever is asked; an item that is put meanwhile is on all of them."""
    busy, most = threading.Semaphore(1), []
    for lifecycle in lifecycles(servers):

        def counted(*given, replace=lifecycle._replace):
            most.append(busy.acquire(blocking=False))
            try:
                time.sleep(0.3)
                return replace(*given)
            finally:
                busy.release()

        monkeypatch.setattr(lifecycle, "_replace", counted)
    asked = servers[1]
    answer = load_all(asked, "other")
    assert answer.status_code == 202 and answer.json()["fleet"]["state"] == "loading"
    assert load_all(servers[0], "two").json()["error"]["code"] == "bundle_conflict"
    change = {"items": [{"item_id": "new", "title": "a kettle"}]}
    assert servers[2].put("/v1/items", json=change).status_code == 200
    assert settled(asked) == {"path": "other", "state": "ready", "message": ""}
    assert most == [True] * SERVERS
    assert {serves(server)["path"] for server in servers} == {"other"}
    for server in servers:
        wait_for(lambda: server.get("/v1/items/new").status_code == 200, "it lacks the item")  # noqa: B023


@pytest.mark.parametrize("seed", range(3))
def test_all_go_back_if_one_refuses_it(servers, bundles, monkeypatch, seed):
    """Its check fails, or it has another bundle of this name; the message names it."""
    random = np.random.default_rng(seed)
    failing = int(random.integers(SERVERS))
    lifecycle = lifecycles(servers)[failing]
    if seed % 2:
        monkeypatch.setattr(lifecycle, "digest", lambda name: "0" * 64)
    else:
        monkeypatch.setattr(lifecycle.loader, "check", refuse)
    asked = servers[(failing + 1) % SERVERS]
    assert load_all(asked, "two").status_code == 202
    found = settled(asked)
    assert found["state"] == "failed" and f":{failing + 1}: " in found["message"]
    assert ("another bundle" if seed % 2 else "refused on purpose") in found["message"]
    assert {serves(server)["path"] for server in servers} == {"one"}


def refuse(*_):
    raise UnfitBundle("refused on purpose")


def test_what_cannot_begin_is_refused(servers, bundles):
    for name, status in (("nothing", 404), ("..", 422)):
        assert load_all(servers[0], name).status_code == status
    (bundles / "damaged").mkdir()
    (bundles / "damaged" / "manifest.json").write_text("{}")
    answer = load_all(servers[0], "damaged")
    assert answer.status_code == 404 and str(bundles) not in answer.text
    lifecycle = lifecycles(servers)[0]
    config = lifecycle.loader.config.model_copy(update={"catalog_log": "file"})
    with run_server(config) as alone:
        answer = load_all(alone, "two")
        assert answer.status_code == 422 and "catalog_log" in answer.text
        assert "fleet" not in alone.get("/admin/bundle", headers=ADMIN).json()


def rollout(bundles):
    digest = secrets.token_hex(32)
    return Rollout(id=secrets.token_hex(8), path="two", digest=digest)


@pytest.fixture
def directory(redis_url, empty_redis):
    found = FleetDirectory(connect(redis_url), "elsewhere")
    yield found
    found.close()


def test_a_turn_is_free_once_its_server_is_silent_or_gone(directory, bundles, monkeypatch):
    load = rollout(bundles)
    assert directory.begin(load) and not directory.begin(rollout(bundles))
    for name in ("a", "b"):
        assert directory.report(Replica(id=name)) == load
    assert directory.take_turn(load, "a") and directory.take_turn(load, "a")
    assert not directory.take_turn(load, "b")
    monkeypatch.setattr(fleet, "TTL_S", 0.05)
    time.sleep(0.1)
    directory.report(Replica(id="b"))
    assert directory.take_turn(load, "b") and not directory.take_turn(load, "a")
    directory.leave("b")
    assert directory.take_turn(load, "a")
    directory.advance(load, "a", "loading")
    assert directory.take_turn(load, "b")


def test_only_the_known_load_in_its_known_state_is_changed(directory, bundles):
    load = rollout(bundles)
    directory.begin(load)
    directory.advance(rollout(bundles), "a", "failed")
    assert directory.report(Replica(id="a")).state == "loading"
    directory.advance(load, "a", "returning", "a: \x1b[31m\n" + "é" * 2000)
    back = directory.report(Replica(id="a"))
    assert back.state == "returning" and back.message.startswith("a:  [31m é")
    directory.advance(load, "b", "ready")
    assert not directory.take_turn(load, "b") and directory.take_turn(back, "b")
    directory.advance(back, "a", "failed")
    assert directory.report(Replica(id="a")).state == "failed" and directory.begin(load)


@pytest.mark.parametrize("field", ["id", "path", "digest", "force", "state", "message"])
def test_a_load_that_others_have_damaged_is_left_out(directory, empty_redis, bundles, field):
    directory.begin(rollout(bundles))
    value = b"\x1b" * 2000 if field in ("path", "message") else b"\xff\xfe"
    empty_redis.hset("recserve:items:{elsewhere}:rollout", field, value)
    found = directory.report(Replica(id="a"))
    assert found is None
    assert len(directory.read().replicas) == 1


def test_a_load_is_forgotten_if_no_server_reports(directory, empty_redis, bundles, monkeypatch):
    monkeypatch.setattr(fleet, "ROLLOUT_TTL_S", 0.2)
    directory.begin(rollout(bundles))
    for _ in range(5):
        time.sleep(0.06)
        assert directory.report(Replica(id="a")) is not None
    time.sleep(0.25)
    assert directory.report(Replica(id="a")) is None
