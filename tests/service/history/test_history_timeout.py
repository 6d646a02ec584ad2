"""A request goes on without a stored history that takes too long, and an event is never lost."""

import signal

import pytest

from recserve.config import ServerConfig
from recserve.features.history.stores import GuardedStore
from recserve.server.loader import ServiceLoader
from recserve.service import Service
from recserve.service.options import ServiceOptions
from tests.support.live_server import live
from tests.support.redis_server import start_redis
from tests.support.tiny_bundle import shared_bundle


@pytest.fixture
def started(tmp_path):
    process, port = start_redis(tmp_path)
    yield process, f"redis://127.0.0.1:{port}/0"
    process.kill()
    process.wait()


def test_redis_that_stops_degrades_answers_and_loses_no_event(started, tmp_path):
    redis, url = started
    options = ServiceOptions(history_timeout_ms=30, journal=tmp_path / "items")
    with Service.open(shared_bundle(), url, "cpu", options=options) as service:
        samples = service.samples(1, 5)
        user, item = samples["users"][0], samples["items"][0]
        body = {"user": {"id": user}, "k": 5}
        rank = {"user": {"id": user}, "candidates": [{"item_id": item}]}
        event = {"events": [{"user_id": "new", "item_id": item, "event_id": "e1"}]}
        reads = service.histories.store
        reads.read_timeout_s = 60.0  # however busy this machine is
        with live(service) as client:
            before = client.post("/v1/recommend", json=body).json()
            assert before["degraded"] == []
            redis.send_signal(signal.SIGSTOP)
            reads.read_timeout_s = 0.03
            for path, request in (("/v1/recommend", body), ("/v1/rank", rank)):
                answer = client.post(path, json=request)
                assert answer.status_code == 200
                assert answer.json()["degraded"] == ["history_unavailable", "cold_start"]
            refused = client.post("/v1/events", json=event)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "history_unavailable"
            redis.send_signal(signal.SIGCONT)
            reads.read_timeout_s = 60.0
            again = client.post("/v1/events", json=event).json()
            assert again["accepted"] + again["duplicates"] == 1
            stored = client.get("/v1/users/new/history").json()["events"]
            assert [one["item_id"] for one in stored] == [item]
            after = client.post("/v1/recommend", json=body).json()
            assert after["degraded"] == [] and after["items"] == before["items"]


@pytest.mark.slow
def test_the_setting_reaches_the_store_and_lmdb_needs_none(started, tmp_path):
    settings = {"bundle": str(shared_bundle()), "journal": str(tmp_path / "items")}
    for store, given, expected_s in (
        (started[1], {}, 0.1),
        (started[1], {"history_timeout_ms": "250"}, 0.25),
        (f"lmdb:{tmp_path}/store", {}, None),
    ):
        config = ServerConfig.load({**settings, "store": store, "device": "cpu", **given})
        with ServiceLoader(config).first() as service:
            opened = service.histories.store
            assert opened.blocks == isinstance(opened, GuardedStore) == (expected_s is not None)
            assert not opened.blocks or opened.read_timeout_s == expected_s
