"""A model output that is NaN is a 500 in the one shape of errors, and the next answer is right."""

import pytest
import torch

from recserve.drafters.none import NoDrafter
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.service import Service, ServiceOptions
from recserve.service.text.model import TextModel
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.live_server import live
from tests.support.scripted_text import VOCABULARY, byte_tokenizer
from tests.support.tiny_bundle import shared_bundle

INTERNAL = {"message": "internal error", "type": "server_error", "param": None, "code": "internal"}


class Fault:
    """Makes all that one forward of a runner returns NaN: the next one, or one that comes later."""

    def __init__(self, monkeypatch, runner):
        self.left, compute = 0, runner.compute

        def broken(*inputs):
            states = compute(*inputs)
            self.left -= 1
            return torch.full_like(states, float("nan")) if self.left == 0 else states

        monkeypatch.setattr(runner, "compute", broken)

    def strike(self, forward=1):
        self.left = forward


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    store = f"lmdb:{folder}/store"
    with live(
        Service.open(shared_bundle(), store, "cpu", ServiceOptions(journal=folder / "items"))
    ) as client:
        yield client


def answered(client, route, body):
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def history(client):
    return client.app.state.lifecycle.service.catalog.current.catalog.items.ids


def assert_fails_once(client, fault, route, body, said):
    """In its first forward, and where it has one in its second, under a root that is right.

    said: what of an answer must stay the same. Returns the answer right after.
    """
    for forward in (1, 2):
        fault.strike(forward)
        failed = client.post(route, json=body)
        if forward == 2 and fault.left > 0:  # one forward was all
            assert failed.status_code == 200
            continue
        assert failed.status_code == 500 and failed.json() == {"error": INTERNAL}
        after = answered(client, route, body)
        assert said(after) == said(answered(client, route, body))
    return after


def test_slates(server, monkeypatch):
    lane = server.app.state.lifecycle.service.engine.schedulers["recommender"]
    fault, ids = Fault(monkeypatch, lane.runner), history(server)
    for number, strategy in enumerate(("beam", "speculative", "nezha")):
        body = {
            "history": [ids[3 * number], ids[100]],
            "strategy": strategy,
            "exclude": {"seen": False},
        }
        after = assert_fails_once(
            server,
            fault,
            "/v1/recommend",
            body,
            lambda a: [(item["item_id"], item["source"]) for item in a["items"]],
        )
        assert {item["source"] for item in after["items"]} == {"model"}
        assert after["degraded"] == [] and after["exact"] == (strategy != "nezha")


@pytest.mark.parametrize("scorer, model", [("ranker", "ranker"), ("likelihood", "recommender")])
def test_rankings(server, scorer, model, monkeypatch):
    engine = server.app.state.lifecycle.service.engine
    fault, ids = Fault(monkeypatch, engine.schedulers[model].runner), history(server)
    body = {
        "history": [ids[7], ids[57]],
        "candidates": [{"item_id": ids[c]} for c in range(20, 30)],
        "scorer": scorer,
    }
    after = assert_fails_once(
        server,
        fault,
        "/v1/rank",
        body,
        lambda a: [item["item_id"] for item in a["items"]],
    )
    assert all(score is not None for item in after["items"] for score in item["scores"].values())


@pytest.fixture(scope="module")
def text_server(tmp_path_factory):
    torch.manual_seed(3)
    decoder = DecoderConfig(32, 2, 4, 2, 8, 48, max_positions=700)
    network = LanguageModel(LanguageModelConfig(decoder, VOCABULARY)).requires_grad_(False).eval()
    tokenizer = TextTokenizer.open(byte_tokenizer(tmp_path_factory.mktemp("toy")))
    engine = build_engine(EngineModels(text=network), EngineConfig(kv_bytes=2**24))
    engine.start()
    none, cpu = {"none": NoDrafter()}, torch.device("cpu")
    model = TextModel("toy", tokenizer, VOCABULARY, (), 700, 1, cpu, none)
    with live(Service(engine, model.device, text=model)) as client:
        yield client


TEXTS = {
    "/v1/completions": (
        {"prompt": "one", "max_tokens": 6, "temperature": 0},
        lambda a: a["choices"][0]["text"],
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "two"}], "max_tokens": 6, "temperature": 0},
        lambda a: a["choices"][0]["message"]["content"],
    ),
    "/v1/rerank": (
        {"query": "three", "documents": ["a", "b"]},
        lambda a: [result["index"] for result in a["results"]],
    ),
    "/generative_scoring": (
        {"query": "four", "items": ["a"], "label_token_ids": [1, 2]},
        lambda a: len(a["data"]),
    ),
}


@pytest.mark.parametrize("route", TEXTS)
def test_texts(text_server, route, monkeypatch):
    engine = text_server.app.state.lifecycle.service.engine
    fault = Fault(monkeypatch, engine.schedulers["text"].runner)
    body, said = TEXTS[route]
    fault.strike()
    failed = text_server.post(route, json=body)
    assert failed.status_code == 500 and failed.json() == {"error": INTERNAL}
    assert said(answered(text_server, route, body)) == said(answered(text_server, route, body))


def test_a_stream_ends_with_the_error(text_server, monkeypatch):
    engine = text_server.app.state.lifecycle.service.engine
    fault, read = Fault(monkeypatch, engine.schedulers["text"].runner), []
    body = {"prompt": "five", "max_tokens": 50, "temperature": 0, "stream": True}
    fault.strike(9)
    with text_server.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            read.append(line)
    assert sum('"internal"' in line for line in read) == 1
    assert 0 < sum('"choices"' in line for line in read) <= 8
