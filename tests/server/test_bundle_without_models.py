"""A server of a bundle that no model was trained on yet: it serves items, events and figures."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from recserve.service import Service, ServiceOptions
from tests.support.live_server import live
from tests.support.tiny_bundle import tiny_bundle

READ = ["/metrics", "/version", "/v1/models", "/v1/items", "/v1/users", "/v1/event-types", "/v2"]
READ += ["/health/ready", "/v1/experiments", "/playground/recent", "/openapi.json", "/"]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    bundle = tiny_bundle(folder, ranker=False, recommender=False)
    options = ServiceOptions(journal=folder / "items")
    with live(Service.open(bundle, f"lmdb:{folder}/store", "cpu", options)) as client:
        yield client


@pytest.mark.parametrize("path", READ)
def test_what_can_be_read_is_read(client, path):
    said = client.get(path)
    assert said.status_code in (200, 404), said.text
    assert said.status_code == 200 or path.startswith("/playground")


def test_the_metrics_have_the_requests_and_no_engine(client):
    assert client.get("/v1/models").json()["data"] == []
    families = {
        family.name for family in text_string_to_metric_families(client.get("/metrics").text)
    }
    assert "recserve_request_seconds" in families


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/recommend", {"history": ["item000001"]}),
        ("/v1/rank", {"history": [], "candidates": [{"item_id": "item000001"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_what_needs_a_model_says_which(client, path, body):
    said = client.post(path, json=body)
    assert (said.status_code, said.json()["error"]["code"]) == (404, "unknown_model")


def test_without_a_recommender_a_slate_says_which_command_makes_one_and_what_is_there(client):
    said = client.post("/v1/recommend", json={"history": ["item000001"], "k": 3}).json()["error"]
    assert "recserve train recommender" in said["message"] and "popular" in said["message"]


@pytest.mark.parametrize("strategy", ["popular", "latest"])
def test_the_lists_are_served(client, strategy):
    said = client.post("/v1/recommend", json={"strategy": strategy, "k": 3}).json()
    assert said["strategy"] == strategy and len(said["items"]) == 3
    assert {item["source"] for item in said["items"]} == {strategy}
