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


def test_an_outcome_moves_auto_to_dense_and_the_slate(client, user):
    click, save, default = (
        ask(client, {**user, "outcome": mix})
        for mix in ({"click": 1.0}, {"save": 0.1}, {"click": 4, "save": 1})
    )
    assert {click["strategy"], save["strategy"]} == {"dense"}
    assert items(click) != items(save)
    assert items(default) == items(ask(client, {**user, "strategy": "dense"}))
    assert ask(client, user)["strategy"] == "speculative"


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
