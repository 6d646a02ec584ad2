"""A server of a bundle that no model was trained on yet: it serves items, events and figures."""

import json

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from recserve.batch.generate import Defaults
from recserve.batch.recipe import SlateRecipe
from recserve.cli.app import app
from recserve.service import Service, ServiceOptions
from tests.support.live_server import live
from tests.support.tiny_bundle import tiny_bundle

BEAM = {"history": ["item000001"], "k": 3, "strategy": "beam"}
READ = ["/metrics", "/version", "/v1/models", "/v1/items", "/v1/users", "/v1/event-types", "/v2"]
READ += ["/health/ready", "/v1/experiments", "/playground/recent", "/openapi.json", "/"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("untrained")


@pytest.fixture(scope="module")
def client(folder):
    bundle = tiny_bundle(folder, ranker=False, recommender=False)
    options = ServiceOptions(journal=folder / "items")
    with live(Service.open(bundle, f"lmdb:{folder}/store", "cpu", options)) as client:
        yield client


@pytest.mark.parametrize("path", READ)
def test_what_can_be_read_is_read(client, path):
    said = client.get(path)
    assert said.status_code in (200, 404), said.text
    assert said.status_code == 200 or path.startswith("/playground")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/recommend", {"history": ["item000001"], "strategy": "beam"}),
        ("/v1/rank", {"history": [], "candidates": [{"item_id": "item000001"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_what_needs_a_model_says_which(client, path, body):
    said = client.post(path, json=body)
    assert (said.status_code, said.json()["error"]["code"]) == (404, "unknown_model")


def test_without_a_recommender_a_slate_says_which_command_makes_one_and_what_is_there(client):
    said = client.post("/v1/recommend", json=BEAM).json()["error"]
    assert "recserve train recommender" in said["message"] and "popular" in said["message"]


def slates_over_http(bundle, client, fields):
    """A slate of each route: its item ids and the codes of `degraded`."""
    history = {"history": ["item000001"]}
    for body in ({}, {"strategy": "auto"}, fields):
        said = client.post("/v1/recommend", json=history | body | {"k": 3})
        assert said.status_code == 200, said.text
        answer = said.json()
        assert answer["strategy"] == "popular" and not answer["exact"]
        yield [item["item_id"] for item in answer["items"]], answer["degraded"]
    data = {"name": "history", "shape": [1, 1], "datatype": "BYTES", "data": [["item000001"]]}
    count = {"name": "k", "shape": [1], "datatype": "INT64", "data": [3]}
    said = client.post("/v2/models/recommend/infer", json={"inputs": [data, count]})
    assert said.status_code == 200, said.text
    assert client.get("/v2/models/recommend/ready").json()["ready"] is True
    outputs = {one["name"]: one["data"] for one in said.json()["outputs"]}
    yield outputs["item_id"], outputs["degraded"]


def slates_of_commands(bundle, client, fields):
    """A slate of the command, of Python and of a batch job."""
    asked = ["recommend", "--bundle", str(bundle), "--history", "item000001", "--json", "-k", "3"]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == 0, ran.output
    answer = json.loads(ran.stdout)
    yield [item["item_id"] for item in answer["items"]], answer["degraded"]
    with SlateRecipe(str(bundle), Defaults(k=3)).open() as task:
        rows = pa.table({"user_id": ["a"], "history": [["item000001"]]})
        answers = task(rows, 0).answers
    assert set(answers.column("model_version").to_pylist()) == {"untrained"}
    assert set(answers.column("strategy").to_pylist()) == {"popular"}
    yield answers.column("item_id").to_pylist(), ["no_recommender"]


@pytest.mark.parametrize("slates", [slates_over_http, slates_of_commands])
@pytest.mark.parametrize("fields", [{"dense_weight": 2.0}, {"beam_width": 70, "explain": True}])
def test_auto_before_training_is_the_popular_list(client, folder, slates, fields):
    """A service that sends `auto` works on its first day, and says that no model chose."""
    expected = client.post("/v1/recommend", json=BEAM | {"strategy": "popular"}).json()
    ids = [item["item_id"] for item in expected["items"]]
    for found, degraded in slates(folder / "bundle", client, fields):
        assert found == ids and degraded == ["no_recommender"]
