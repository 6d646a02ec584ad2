"""Experiments with text: drafters as arms, the label in whole answers and in streams."""

import json

import pytest
import torch

from recserve.config import ServerConfig
from recserve.engine.engine_config import EngineConfig
from recserve.experiments.assignment import ArmSplit
from recserve.schemas.items import InvalidRequest
from recserve.server.app import create_app
from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from tests.support.live_server import live
from tests.support.paths import reference

DRAFT = {
    "name": "draft",
    "use": "text",
    "arms": [
        {"name": "plain", "fields": {"speculation.drafter": "none"}},
        {
            "name": "suffix",
            "fields": {"speculation.drafter": "suffix", "speculation.num_tokens": 4},
        },
    ],
}
ASK = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
SPLIT = ArmSplit.even("draft", ["plain", "suffix"])
USERS = {
    arm: next(f"u{i}" for i in range(99) if SPLIT.assign(f"u{i}").arm == arm) for arm in SPLIT.arms
}


@pytest.fixture(scope="module")
def client():
    text = load_text(
        TextSettings(reference("stories260k"), drafters=("suffix",)), torch.device("cpu")
    )
    with live(
        Service.of_text(text, EngineConfig(load_aware=False)), experiments=[DRAFT]
    ) as running:
        yield running


def complete(client, user, **fields):
    answer = client.post("/v1/completions", json={**ASK, "user": user, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def test_both_arms_write_the_same_text_and_say_so(client):
    texts = set()
    for arm, user in USERS.items():
        answer = complete(client, user)
        body = answer.json()
        assert body["experiment"]["arm"] == arm and body["experiment"]["sticky"] is True
        assert answer.headers["x-recserve-experiment"] == f"draft/{arm}"
        metrics = body["metrics"]["speculative_decoding"]
        assert (metrics is None) == (arm == "plain")
        texts.add(body["choices"][0]["text"])
    assert len(texts) == 1


def test_a_stream_has_the_label_in_its_last_chunk(client):
    answer = complete(client, USERS["suffix"], stream=True)
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    assert chunks[-1]["experiment"]["arm"] == "suffix"
    assert all("experiment" not in chunk for chunk in chunks[:-1])
    counted = complete(client, USERS["plain"], stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(line[6:]) for line in counted.text.split("\n\n")[:-2]]
    assert chunks[-1]["choices"] == [] and chunks[-1]["experiment"]["arm"] == "plain"


def test_own_drafting_options_exclude_a_request(client):
    answer = complete(client, USERS["suffix"], speculation={"drafter": "none"}).json()
    assert answer["experiment"]["arm"] is None
    assert answer["experiment"]["reason"] == "the request sets speculation"


def test_requests_are_counted_by_arm(client):
    def counts():
        (one,) = client.get("/v1/experiments").json()["experiments"]
        return {arm["name"]: arm["requests"] for arm in one["arms"]}, one

    before, _ = counts()
    complete(client, USERS["suffix"])
    complete(client, USERS["suffix"], stream=True)
    complete(client, USERS["plain"])
    after, one = counts()
    assert after == {"plain": before["plain"] + 1, "suffix": before["suffix"] + 2}
    assert one["arms"][1]["errors"] == 0 and one["arms"][1]["p50_ms"] > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"speculation.num_tokens": 0}, "fields.speculation.num_tokens: expected int >= 1, got 0"),
        ({"max_tokens": 3}, "fields.max_tokens: expected a field of speculation, temperature"),
        ({"speculation.tree": [[0], []]}, "fields.speculation.tree[1]"),
    ],
)
def test_a_wrong_text_arm_is_refused(fields, words):
    arms = [{"name": "a"}, {"name": "b", "fields": fields}]
    with pytest.raises(InvalidRequest) as refused:
        create_app(ServerConfig(llm="x", experiments=[{**DRAFT, "arms": arms}]))
    assert words in str(refused.value)


def test_a_drafter_that_is_not_loaded_stops_the_start(client):
    arms = [{"name": "a"}, {"name": "b", "fields": {"speculation.drafter": "eagle"}}]
    service = client.app.state.lifecycle.service
    app = create_app(ServerConfig(llm="x", experiments=[{**DRAFT, "arms": arms}]), service)
    app.state.lifecycle.start()
    app.state.lifecycle.loaded.wait(30)
    assert "experiment draft, arm b: speculation.drafter" in str(app.state.lifecycle.failure)


def test_an_arm_that_does_not_fit_a_request_leaves_it_alone(client):
    arms = [{"name": "a"}, {"name": "b", "fields": {"speculation.verifier": "greedy"}}]
    split = ArmSplit.even("rule", ["a", "b"])
    user = next(f"u{i}" for i in range(99) if split.assign(f"u{i}").arm == "b")
    text = load_text(TextSettings(reference("stories260k")), torch.device("cpu"))
    one = {"name": "rule", "use": "text", "arms": arms}
    with live(Service.of_text(text, EngineConfig(load_aware=False)), experiments=[one]) as other:
        fits = complete(other, user).json()
        assert fits["experiment"]["arm"] == "b"
        answer = complete(other, user, temperature=0.7)
        label = answer.json()["experiment"]
        assert label["arm"] is None
        assert label["reason"].startswith("the arm does not fit: speculation.verifier")
        assert answer.headers["x-recserve-experiment"] == "rule/-"
        (found,) = other.get("/v1/experiments").json()["experiments"]
        assert [(arm["requests"], arm["errors"]) for arm in found["arms"]] == [(0, 0), (2, 1)]
