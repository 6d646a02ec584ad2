"""HTTP as clients meet it: answers, the one error shape, limits, keys, overload, cancellation."""

import gzip
import json
import re
import socket
from contextlib import contextmanager

import pytest
from jsonschema import Draft202012Validator

from recserve.engine.engine import Engine
from recserve.features.catalog.catalog_log import JournalError
from recserve.schemas.api import OPERATIONS, is_admin
from recserve.server.errors import TABLE, is_inference
from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle
from tests.support.waiting import until


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    with live(Service.open(shared_bundle(), f"lmdb:{store}", "cpu")) as running:
        yield running


@pytest.fixture(scope="module")
def samples(client):
    return client.get("/playground/samples").json()


@pytest.fixture
def user(samples):
    return samples["users"][0]


@contextmanager
def stalled(engine: Engine):
    """No step happens inside: requests queue up."""
    with engine._stepping:
        yield


def engine_of(client) -> Engine:
    return client.app.state.lifecycle.service.engine


def error_of(answer):
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    return body["error"]


def test_degraded_answers_are_counted_on_every_route(client, samples):
    def counted():
        found = re.findall(r'degraded_answers_total\{code="(\w+)"\} (\d+)', page())
        return {code: int(number) for code, number in found}

    def page():
        return client.get("/metrics").text

    before = counted()
    nobody, twice = {"user": {"id": "nobody-yet"}}, [{"item_id": samples["items"][0]}] * 2
    ranking = {**nobody, "candidates": twice}
    assert client.post("/v1/recommend", json=nobody).json()["degraded"] == ["cold_start"]
    said = client.post("/v1/rank", json=ranking).json()["degraded"]
    assert said == ["cold_start", "duplicate_candidates"]
    client.post("/v1/rank:batch", json={"requests": [ranking, ranking]})
    tensor = {"name": "user_id", "datatype": "BYTES", "shape": [1], "data": ["nobody-yet"]}
    assert client.post("/v2/models/recommend/infer", json={"inputs": [tensor]}).status_code == 200
    more = {code: number - before[code] for code, number in counted().items()}
    assert {code: number for code, number in more.items() if number} == {
        "cold_start": 5,
        "duplicate_candidates": 3,
    }


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate", "GZIP", "identity, gzip"])
def test_a_compressed_body_is_refused_at_every_route(client, coding):
    """Also one that is not compressed in truth; `identity` is no coding."""
    for row in OPERATIONS.values():
        if row.body is None or is_admin(row.path):
            continue
        path = re.sub(r"\{.*?\}", "recommend", row.path)
        for body in (gzip.compress(b"{}"), b"{}"):
            answer = client.request(
                row.method, path, content=body, headers={"Content-Encoding": coding}
            )
            assert answer.status_code == 415, (row.name, answer.text)
            error = answer.json()["error"]
            message = error if is_inference(path) else error["message"]
            assert "Content-Encoding" in message and "not compressed" in message
    plain = client.post("/v1/recommend", content=b"{}", headers={"Content-Encoding": "identity"})
    assert plain.status_code == 422


def test_a_body_of_unknown_length_is_bounded_too(client):
    answer = client.post("/v1/recommend", content=iter([b" " * (1 << 18)] * 5))
    assert answer.status_code == 413


def test_openapi_says_which_errors_each_route_has(client):
    said = client.get("/openapi.json").json()
    documented = {}
    for path, operations in said["paths"].items():
        for operation in operations.values():
            codes = {
                status: re.findall(r"[a-z_]+", entry["description"].removeprefix("`code` is"))
                for status, entry in operation["responses"].items()
                if status.isdigit() and int(status) >= 400
            }
            documented[operation["operationId"]] = codes
            assert {"500", "503"} <= codes.keys(), path
    assert "queue_full" in documented["recommend"]["429"]
    assert {"unknown_field", "missing_field", "out_of_range"} <= set(documented["chat"]["400"])
    assert not {"401", "429"} & documented["health"].keys()
    assert {"quota_exceeded", "queue_full"} <= set(documented["item"]["429"])
    assert documented["item"]["404"] == ["unknown_item"]
    every = {code for codes in documented.values() for found in codes.values() for code in found}
    missing = {row.code for row in TABLE.values()} - every
    assert missing == {"client_gone"}  # nobody is there to read it
    schemas = said["components"]["schemas"]
    recommend = schemas["RecommendRequest"]
    functions = schemas["ChatRequest"]["properties"]["functions"]
    assert [fits(recommend, {name: "x"}) for name in ("user", "history", "k")] == [
        True,
        True,
        False,
    ]
    assert [fits(functions, value) for value in (None, [], {}, [{}])] == [True, True, True, False]
    stream = said["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    data = stream["text/event-stream"]["schema"]["properties"]["data"]
    last, chunk = data["anyOf"]
    assert last == {"const": "[DONE]"}
    assert chunk["contentSchema"]["anyOf"][0]["$ref"].endswith("ChatChunk")


def fits(schema: dict, value: object) -> bool:
    """Whether the rules of a schema beside those on its fields allow a value."""
    rules = {name: rule for name, rule in schema.items() if name in ("not", "anyOf")}
    return Draft202012Validator(rules).is_valid(value)


def test_late_answers_are_504_and_their_work_is_not_done(client, user):
    engine = engine_of(client)
    with stalled(engine):
        for extra in (
            {"json": {"user": {"id": user}, "timeout_ms": 40}},
            {"json": {"user": {"id": user}}, "headers": {"X-Deadline-Ms": "40"}},
        ):
            answer = client.post("/v1/recommend", **extra)
            assert answer.status_code == 504
            assert error_of(answer)["code"] == "deadline_exceeded"
        assert all(w.future.cancelled() for w in engine.queue.waiting)
    bad = client.post("/v1/recommend", json={"user": {"id": user}}, headers={"X-Deadline-Ms": "x"})
    assert bad.status_code == 422


def test_work_of_a_client_that_went_away_is_cancelled(client, user):
    engine = engine_of(client)
    with stalled(engine):
        before = list(engine.queue.waiting)
        body = json.dumps({"user": {"id": user}, "k": 5}).encode()
        head = f"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
            raw.sendall(head.encode() + body)
            until(lambda: len(engine.queue) > len(before) or engine.stats().queue_depth > 0)
            future = list(engine.queue.waiting)[-1].future
            assert not future.cancelled()
        until(future.cancelled)
    until(lambda: 'failed_total{reason="cancelled"} 1' in client.get("/metrics").text)
    assert client.post("/v1/recommend", json={"user": {"id": user}}).status_code == 200


def test_what_goes_wrong_inside_stays_inside(tmp_path, caplog):
    service = Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu")
    secret = "/srv/secret/place"

    def broken(*_):
        raise KeyError(secret)

    with live(service) as client:
        service.catalog.get = broken
        answer = client.get("/v1/items/x")
        assert answer.status_code == 500
        assert error_of(answer)["message"] == "internal error"
        assert secret not in answer.text and "Traceback" not in answer.text
        assert answer.headers["x-request-id"] in caplog.text and secret in caplog.text
        assert client.get("/health/ready").status_code == 200


def test_a_disk_that_refuses_is_named_to_the_operator_alone(tmp_path, caplog):
    service = Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu")
    secret = "/srv/secret/place: No space left on device"

    def full(*_):
        raise JournalError(secret)

    with live(service) as client:
        service.catalog.put = full
        answer = client.put("/v1/items", json={"items": [{"item_id": "a"}]})
    assert answer.status_code == 503 and error_of(answer)["code"] == "items_read_only"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] in caplog.text and secret in caplog.text
