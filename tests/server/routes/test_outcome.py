"""The field `outcome` over HTTP: what it does, and what is refused with which words."""

import shutil

import pytest
import torch

from recserve.bundle.bundle import Bundle
from recserve.models.dense_retriever import DenseRetriever, RetrieverConfig, save_retriever
from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle


def with_retriever(folder):
    """The shared bundle with a drawn retriever of two outcomes, `click` and `save`."""
    root = folder / "bundle"
    shutil.copytree(shared_bundle(), root)
    bundle = Bundle.open(root)
    config = RetrieverConfig(32, 24, ("click", "save"), (0.8, 0.2), "events", (1, 2), (0.6, 0.4))
    torch.manual_seed(1)
    retriever = DenseRetriever(config)
    for name, weight in retriever.named_parameters():
        if name != "scale":
            weight.data.add_(torch.randn_like(weight))
    save_retriever(retriever, bundle.directory("retriever"))
    bundle.commit("retriever", {"recommender": bundle.digest("recommender")})
    return root


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outcome")
    with live(Service.open(with_retriever(folder), f"lmdb:{folder}/store", "cpu")) as running:
        yield running


@pytest.fixture(scope="module")
def user(client):
    return {"user": {"id": client.get("/playground/samples").json()["users"][0]}, "k": 12}


def ask(client, body):
    answer = client.post("/v1/recommend", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def items(answer):
    return [item["item_id"] for item in answer["items"]]


def test_dense_answers_without_a_round(client, user):
    answer = ask(client, {**user, "strategy": "dense", "explain": True})
    assert (answer["strategy"], answer["exact"], answer["rounds"]) == ("dense", False, 0)
    assert len(set(items(answer))) == 12 and answer["degraded"] == []
    assert answer["explanation"]["nodes"] == 0
    scores = [item["score"] for item in answer["items"]]
    assert scores == sorted(scores, reverse=True)
    assert {item["source"] for item in answer["items"]} == {"model"}


def test_an_outcome_moves_auto_to_dense_and_the_slate(client, user):
    click, save, default = (
        ask(client, {**user, "outcome": mix})
        for mix in ({"click": 1.0}, {"save": 0.1}, {"click": 4, "save": 1})
    )
    assert {click["strategy"], save["strategy"]} == {"dense"}
    assert items(click) != items(save)
    assert items(default) == items(ask(client, {**user, "strategy": "dense"}))
    assert ask(client, user)["strategy"] == "speculative"


def test_filters_hold(client, user):
    everything = items(ask(client, {**user, "k": 500, "strategy": "dense"}))
    kept = everything[-3:]
    body = {**user, "k": 5, "strategy": "dense", "filter": {"in": ["item_id", kept]}}
    answer = ask(client, body)
    assert items(answer) == kept and answer["degraded"] == ["fewer_than_k"]


def test_specgr_scores_are_the_likelihoods(client, user):
    answer = ask(client, {**user, "strategy": "specgr", "explain": True})
    assert (answer["strategy"], answer["exact"]) == ("specgr", False) and answer["rounds"] >= 1
    by_id = {item["item_id"]: item["score"] for item in answer["items"] if item["score"]}
    assert len(by_id) == 12 and answer["degraded"] == []
    body = {"user": user["user"], "scorer": "likelihood"}
    body["candidates"] = [{"item_id": item_id} for item_id in by_id]
    ranked = client.post("/v1/rank", json=body).json()["items"]
    for item in ranked:
        assert item["scores"]["likelihood"] == pytest.approx(by_id[item["item_id"]], abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"outcome": {"buy": 1}}, "outcome", "expected names from click, save, got 'buy'"),
        ({"outcome": {"click": 0}}, "outcome.click", "> 0.0, got"),
        ({"outcome": {"click": -1}}, "outcome.click", "> 0.0, got"),
        ({"outcome": {"click": "much"}}, "outcome.click", "expected float, got str"),
        ({"outcome": {}}, "outcome", "length >= 1"),
        ({"outcome": "click"}, "outcome", "expected object | null, got str"),
        ({"outcome": {"click": 1}, "strategy": "beam"}, "outcome", "only strategy 'dense'"),
        (
            {"outcome": {"click": 1}, "strategy": "specgr"},
            "outcome",
            "only strategy 'dense'",
        ),
        ({"dense_weight": 1, "strategy": "specgr"}, "dense_weight", "does not use it"),
    ],
)
def test_what_is_refused(client, user, fields, param, message):
    answer = client.post("/v1/recommend", json={**user, **fields})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"], error


def test_a_bundle_without_a_retriever_says_so(tmp_path):
    with live(Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu")) as client:
        for fields, param in (
            ({"outcome": {"click": 1}}, "outcome"),
            ({"strategy": "dense"}, "strategy"),
            ({"strategy": "specgr"}, "strategy"),
        ):
            body = {"history": ["x"], **fields}
            answer = client.post("/v1/recommend", json=body)
            assert answer.status_code == 422 and answer.json()["error"]["param"] == param
