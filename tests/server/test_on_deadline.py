"""`on_deadline`: a list answers where the model is late, through every door."""

import time
from contextlib import contextmanager

import pytest

from recserve.core.errors import DeadlineExceeded
from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

RULES = {
    "k": 7,
    "filter": {"range": ["price", 5, None]},
    "diversity": {
        "caps": [{"field": "brand", "most": 1}],
        "at_least": [{"count": 2, "filter": {"range": ["price", 30, None]}}],
    },
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    with live(Service.open(shared_bundle(), f"lmdb:{store}", "cpu")) as running:
        yield running


@pytest.fixture(scope="module")
def user(client):
    return client.get("/playground/samples").json()["users"][0]


@contextmanager
def stalled(client):
    """No step happens inside."""
    with client.app.state.lifecycle.service.engine._stepping:
        yield


def shown(items):
    return [(item["item_id"], item["score"], item["source"]) for item in items]


@pytest.mark.parametrize("name", ["popular", "latest"])
@pytest.mark.parametrize("rules", [{}, RULES], ids=["plain", "rules"])
def test_a_late_model_is_replaced_by_the_list(client, user, name, rules):
    body = {"user": {"id": user}, **rules}
    wanted = client.post("/v1/recommend", json={**body, "strategy": name}).json()
    with stalled(client):
        late = client.post("/v1/recommend", json={**body, "timeout_ms": 60, "on_deadline": name})
        plain = client.post("/v1/recommend", json={**body, "timeout_ms": 60})
    assert (late.status_code, plain.status_code) == (200, 504)
    answer = late.json()
    assert shown(answer["items"]) == shown(wanted["items"]) != []
    assert answer["strategy"] == name and answer["exact"] is False and answer["rounds"] == 0
    assert answer["degraded"] == [*wanted["degraded"], "deadline_passed"]
    text = client.get("/metrics").text
    assert 'degraded_answers_total{code="deadline_passed"}' in text
    with stalled(client):
        sent = {
            "inputs": [{"name": "user_id", "datatype": "BYTES", "shape": [1], "data": [user]}],
            "parameters": {"timeout_ms": 60, "on_deadline": name},
        }
        tensors = client.post("/v2/models/recommend/infer", json=sent).json()["outputs"]
    found = {one["name"]: one["data"] for one in tensors}
    assert found["strategy"] == [name] and "deadline_passed" in found["degraded"][0]
    # In time, the model answers, and the field changes nothing.
    early = [
        client.post("/v1/recommend", json={**body, **more}) for more in ({}, {"on_deadline": name})
    ]
    assert shown(early[0].json()["items"]) == shown(early[1].json()["items"])


@pytest.mark.parametrize("held", [True, False], ids=["in the queue", "before the queue"])
def test_python_gets_the_list_too(client, user, held):
    service = client.app.state.lifecycle.service
    body = {"user": user, "on_deadline": "popular", "timeout_ms": 20}
    with service.engine.held():
        pending = service.recommender.begin(
            _checked(body), deadline_s=time.monotonic() + (0.02 if held else -1)
        )
        time.sleep(0.05)
    answer = pending.wait()
    assert answer.strategy == "popular" and "deadline_passed" in answer.degraded
    with service.engine.held():
        pending = service.recommender.begin(
            _checked({"user": user}), deadline_s=time.monotonic() + (0.02 if held else -1)
        )
        time.sleep(0.05)
    with pytest.raises(DeadlineExceeded):
        pending.wait()


def test_a_request_that_waits_for_a_thread_gets_the_list_without_the_history(
    client, user, monkeypatch
):
    """The store hangs until the deadline: no history is read, and the answer says so."""
    service = client.app.state.lifecycle.service

    def late(*_, **__):
        raise DeadlineExceeded("the deadline passed before the request was prepared")

    monkeypatch.setattr(service.engine, "check_queue", late)
    body = {"user": {"id": user}, "k": 5}
    assert client.post("/v1/recommend", json=body).status_code == 504
    answer = client.post("/v1/recommend", json={**body, "on_deadline": "latest"})
    assert answer.status_code == 200
    assert answer.json()["degraded"] == ["history_unavailable", "deadline_passed"]
    own = client.post(
        "/v1/recommend", json={"history": ["item000003"], "k": 5, "on_deadline": "latest"}
    ).json()
    assert own["degraded"] == ["deadline_passed"]
    assert "item000003" not in [item["item_id"] for item in own["items"]]


@pytest.mark.parametrize("value", ["beam", "", None, 3])
def test_another_answer_is_refused_by_name(client, value):
    answer = client.post("/v1/recommend", json={"history": [], "on_deadline": value})
    assert answer.status_code == 422 and answer.json()["error"]["param"] == "on_deadline"


def _checked(body):
    from recserve.schemas.items import RecommendRequest
    from recserve.schemas.shorthand import check_body

    return check_body(body, RecommendRequest)
