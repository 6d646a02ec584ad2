"""Triton's own HTTP client with its defaults: metadata, binary tensors, errors as text."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

KEY = "a-key-of-sixteen"
USERS = np.array(["user000001", "user000002"], dtype=object)
ITEMS = np.array([[f"item{2 * row + place:06d}" for place in range(3)] for row in range(2)], object)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[httpx.Client]:
    store = f"lmdb:{tmp_path_factory.mktemp('triton')}/store"
    with live(Service.open(shared_bundle(), store, "cpu")) as client:
        yield client


def open_client(server: httpx.Client) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(f"{server.base_url.host}:{server.base_url.port}")


@pytest.fixture(scope="module")
def client(server) -> Iterator[triton.InferenceServerClient]:
    with open_client(server) as opened:
        yield opened


def tensor(name: str, values: np.ndarray, **form: bool) -> triton.InferInput:
    given = triton.InferInput(
        name, list(values.shape), "BYTES" if values.dtype == object else "INT64"
    )
    return given.set_data_from_numpy(values, **form)


def texts(result: triton.InferResult, name: str) -> list[str]:
    """JSON outputs are str, binary ones bytes."""
    values = result.as_numpy(name).ravel().tolist()
    return [value.decode() if isinstance(value, bytes) else value for value in values]


@pytest.mark.parametrize("form", [{}, {"binary_data": False}])
def test_a_slate_with_the_clients_defaults(server, client, form):
    inputs = [tensor("user_id", USERS, **form), tensor("k", np.array([4]), **form)]
    found = client.infer("recommend", inputs)
    body = {"user": {"id": "user000002"}, "k": 4}
    alone = server.post("/v1/recommend", json=body).json()["items"]
    assert texts(found, "item_id")[4:] == [item["item_id"] for item in alone]
    assert found.as_numpy("item_id").shape == (2, 4)
    assert found.as_numpy("score")[1] == pytest.approx([item["score"] for item in alone])
    assert found.as_numpy("exact").dtype == bool


def test_a_ranking_with_the_clients_defaults(client):
    candidates = ITEMS.copy()
    candidates[1, 1] = "nothing"
    inputs = [tensor("user_id", USERS), tensor("candidates", candidates)]
    found = client.infer("rank", inputs)
    ranks = found.as_numpy("rank")
    assert sorted(ranks[0]) == [1, 2, 3] and ranks[1, 1] == 0
    task = next(o["name"] for o in found.get_response()["outputs"] if o["datatype"] == "FP32")
    assert np.isnan(found.as_numpy(task)).tolist() == [[False] * 3, [False, True, False]]


def test_reserved_parameters_are_taken(server, client):
    version = server.get("/version").json()["model_version"]
    inputs = [tensor("user_id", USERS)]
    asked = {"sequence_id": 7, "sequence_start": True, "sequence_end": True, "priority": 3}
    found = client.infer(
        "recommend",
        inputs,
        model_version=version,
        request_id="r-1",
        timeout=5_000_000,
        parameters={"strategy": "beam", "exclude_seen": False},
        outputs=[
            triton.InferRequestedOutput("item_id"),
            triton.InferRequestedOutput("strategy", binary_data=False),
        ],
        **asked,
    )
    answer = found.get_response()
    assert answer["id"] == "r-1" and answer["model_version"] == version
    assert [one["name"] for one in answer["outputs"]] == ["item_id", "strategy"]
    assert "data" in answer["outputs"][1] and "data" not in answer["outputs"][0]
    assert texts(found, "strategy") == ["beam", "beam"]
    asked = {**asked, "sequence_id": "a-sequence"}
    assert texts(client.infer("recommend", inputs, **asked), "item_id")
    future = client.async_infer("recommend", inputs)
    assert texts(future.get_result(), "strategy")


def refusal(call, *arguments, **named) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **named)
    assert isinstance(caught.value.message(), str) and str(caught.value)
    return caught.value.status(), caught.value.message()


def test_what_is_not_supported_is_refused_in_words(client):
    inputs = [tensor("user_id", USERS)]
    status, said = refusal(client.infer, "recommend", inputs, timeout=60_000_001)
    assert status == "422" and "parameters.timeout: expected int <= 60000000" in said
    outputs = [triton.InferRequestedOutput("score", class_count=2)]
    _, said = refusal(client.infer, "recommend", inputs, outputs=outputs)
    assert "outputs[0].parameters.classification: not supported" in said
    shared = triton.InferInput("user_id", [2], "BYTES").set_shared_memory("region", 10)
    _, said = refusal(client.infer, "recommend", [shared])
    assert "inputs[0].parameters.shared_memory_region" in said
    output = triton.InferRequestedOutput("score")
    output.set_shared_memory("region", 10)
    _, said = refusal(client.infer, "recommend", inputs, outputs=[output])
    assert "outputs[0].parameters.shared_memory_region" in said
    empty = triton.InferInput("user_id", [2], "BYTES")
    _, said = refusal(client.infer, "recommend", [empty])
    assert "inputs[0].data: is required" in said
    _, said = refusal(client.infer, "recommend", inputs, parameters={"strateg": "beam"})
    assert "did you mean strategy?" in said
    status, said = refusal(client.infer, "recommend", inputs, timeout=1)
    assert status == "504"


def test_errors_of_routes_are_texts(client):
    assert refusal(client.infer, "nothing", [tensor("user_id", USERS)])[0] == "404"
    assert refusal(client.get_model_metadata, "rank", "9")[1].startswith("expected version ")
    assert refusal(client.get_model_repository_index)[0] == "404"
    assert refusal(client.load_model, "recommend")[0] == "404"
    for call in (client.get_model_config, client.get_inference_statistics):
        assert refusal(call, "nothing")[0] == "404"
        assert refusal(call, "rank", "9")[1].startswith("expected version ")


def test_the_configuration_describes_the_tensors_of_the_metadata(server, client):
    version = server.get("/version").json()["model_version"]
    for name in ("recommend", "rank"):
        config, metadata = client.get_model_config(name), client.get_model_metadata(name)
        assert client.get_model_config(name, version) == config
        assert (config["name"], config["platform"]) == (name, metadata["platform"])
        assert config["max_batch_size"] == 0  # so dims are whole shapes
        assert config["parameters"] == {"max_rows": {"string_value": "256"}}
        for side in ("input", "output"):
            assert [(one["name"], one["dims"]) for one in config[side]] == [
                (one["name"], one["shape"]) for one in metadata[f"{side}s"]
            ]
        types = {one["name"]: one["data_type"] for one in config["input"] + config["output"]}
        assert types["user_id"] == "TYPE_STRING" and types["exact"] == "TYPE_BOOL"


def test_statistics_count_requests_rows_and_times(server, client):
    version = server.get("/version").json()["model_version"]

    def now(name: str) -> dict:
        (found,) = client.get_inference_statistics(name)["model_stats"]
        assert client.get_inference_statistics(name, version)["model_stats"] == [found]
        return found

    before, others = now("recommend"), now("rank")
    for _ in range(2):
        client.infer("recommend", [tensor("user_id", USERS)])
    refusal(client.infer, "recommend", [tensor("k", np.array([0]))])
    after = now("recommend")
    assert (after["name"], after["version"]) == ("recommend", version)
    assert after["inference_count"] == before["inference_count"] + 4
    assert after["execution_count"] == before["execution_count"] + 2
    stats = {key: (before, after) for key in ("success", "fail")}
    for key, more in (("success", 2), ("fail", 1)):
        one, two = (state["inference_stats"][key] for state in stats[key])
        assert two["count"] == one["count"] + more and two["ns"] > one["ns"]
    assert after["last_inference"] > 10**12 and now("rank") == others
    every = client.get_inference_statistics()["model_stats"]
    assert after in every


def test_errors_of_the_middleware_are_texts(tmp_path):
    """401, 413, 429 and 503 as the client prints them; other routes have their own form."""
    service = Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu")
    settings = {"api_keys": (KEY,), "key_quota": 60, "max_body_bytes": 4096}
    with live(service, **settings) as server, open_client(server) as client:
        inputs = [tensor("user_id", USERS)]
        headers = {"Authorization": f"Bearer {KEY}"}
        assert refusal(client.infer, "recommend", inputs)[0] == "401"
        assert refusal(client.get_server_metadata)[0] == "401"
        assert server.get("/version").json()["error"]["code"] == "invalid_api_key"
        assert texts(client.infer("recommend", inputs, headers=headers), "item_id")
        large = tensor("history", np.full((1, 600), "item000001", object))
        assert refusal(client.infer, "recommend", [large], headers=headers)[0] == "413"
        statuses = set()
        for _ in range(61):
            answer = server.get("/v2", headers={"Authorization": f"Bearer {KEY}"})
            statuses.add(answer.status_code)
        assert statuses >= {429} and isinstance(answer.json()["error"], str)
        server.app.state.lifecycle.draining = True
        assert not client.is_server_ready() and client.is_server_live()
        answer = server.get("/v2/health/ready")
        assert answer.status_code == 503
        assert answer.json() == {"error": "the server is shutting down"}
        server.app.state.lifecycle.draining = False
