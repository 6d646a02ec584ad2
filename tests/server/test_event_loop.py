"""What may take long runs on threads, and a store that hangs holds up nobody else."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from recserve.core.errors import QueueFull
from recserve.features.history.history import StoreUnavailable
from recserve.features.history.stores import GuardedStore
from recserve.service import Service
from recserve.service.pending import Pending
from recserve.service.snapshot import Snapshot
from tests.support.live_server import live
from tests.support.partial_stores import PartialStore
from tests.support.tiny_bundle import shared_bundle


@pytest.fixture
def service(tmp_path):
    with Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu") as opened:
        yield opened


def recorded(monkeypatch, owner, name):
    """Records the names of the threads on which a method runs."""
    method, threads = getattr(owner, name), []

    def call(*arguments):
        threads.append(threading.current_thread().name)
        return method(*arguments)

    monkeypatch.setattr(owner, name, call)
    return threads


def test_a_filter_is_evaluated_on_a_thread(service, monkeypatch):
    threads = recorded(monkeypatch, Snapshot, "allowed")
    with live(service) as client:
        item = client.get("/playground/samples").json()["items"][0]
        body = {"history": [item], "k": 3, "filter": {"not": {"eq": ["item_id", "x"]}}}
        assert client.post("/v1/recommend", json=body).status_code == 200
    assert len(threads) == 1 and threads[0].startswith("items")


def test_a_filter_is_not_evaluated_for_a_queue_that_is_full(service, monkeypatch):
    threads = recorded(monkeypatch, Snapshot, "allowed")

    def full(*_):
        raise QueueFull("full", 3.2)

    monkeypatch.setattr(service.engine, "check_queue", full)
    with live(service) as client:
        item = client.get("/playground/samples").json()["items"][0]
        body = {"history": [item], "k": 3, "filter": {"eq": ["item_id", "x"]}}
        refused = client.post("/v1/recommend", json=body)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "4")
    assert not threads


@pytest.mark.parametrize("k", [3, 300])
def test_a_large_answer_is_made_on_a_thread(service, monkeypatch, k):
    threads = recorded(monkeypatch, Pending, "wait")
    with live(service) as client:
        item = client.get("/playground/samples").json()["items"][0]
        body = {"history": [item], "k": k}
        assert len(client.post("/v1/recommend", json=body).json()["items"]) == k
    assert [name.startswith("items") for name in threads] == [k == 300]


class HangingStore(PartialStore):
    def __init__(self):
        self.go_on, self.calls = threading.Event(), 0

    def get_many(self, user_ids):
        self.calls += 1
        self.go_on.wait(60)
        raise StoreUnavailable("it hangs")


def test_requests_with_a_history_do_not_wait_for_a_store_that_hangs(service):
    store = HangingStore()
    histories = service.histories
    owned, histories.store = histories.store, GuardedStore(store)
    with live(service) as client, ThreadPoolExecutor(40) as pool:
        item = client.get("/playground/samples").json()["items"][0]
        stuck = [
            pool.submit(client.post, "/v1/recommend", json={"user": {"id": f"u{i}"}, "k": 3})
            for i in range(40)
        ]
        while store.calls < 16:  # every thread that one client may have waits
            time.sleep(0.01)
        inline = {"user": {"id": "u"}, "history": [item], "k": 3}
        for path, body in (
            ("/v1/recommend", inline),
            ("/v1/recommend", {**inline, "filter": {"not": {"eq": ["item_id", "x"]}}}),
            ("/v1/rank", {"history": [item], "candidates": [{"item_id": item}]}),
        ):
            assert client.post(path, json=body).status_code == 200
        time.sleep(0.2)  # every call that hangs counts as slow
        store.go_on.set()
        answers = [future.result() for future in stuck]
        assert {a.json()["degraded"][0] for a in answers} == {"history_unavailable"}
        assert all(circuit.is_open for circuit in histories.store.calls.values())
        histories.store = owned
