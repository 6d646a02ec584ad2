"""Clients with different API keys share no cached prefix and no learned drafts."""

import time

import pytest
import torch

from recserve.engine.engine_config import EngineConfig
from recserve.server.access import AccessKeys
from recserve.service import Service, ServiceOptions
from recserve.service.text.loader import TextSettings, load_text
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle
from tests.support.tiny_llm import tiny_llm

ONE, TWO = "the-first-key-of-two", "the-second-key-of-two"
HISTORY = [f"item{number:06d}" for number in (3, 7, 31, 90, 12, 8)]
CANDIDATES = [{"item_id": f"item{number:06d}"} for number in (1, 2)]
REQUESTS = {
    "recommend": ("/v1/recommend", {"history": HISTORY, "k": 5}),
    "rank": ("/v1/rank", {"history": HISTORY, "candidates": CANDIDATES}),
    "filtered": (
        "/v1/recommend",
        {"history": HISTORY, "k": 5, "filter": {"not": {"eq": ["item_id", "x"]}}},
    ),
    "completion": ("/v1/completions", {"model": "toy", "prompt": "a secret" * 9, "max_tokens": 2}),
    "chat": (
        "/v1/chat/completions",
        {
            "model": "toy",
            "messages": [{"role": "user", "content": "a secret" * 8}],
            "max_tokens": 2,
        },
    ),
    "rerank": ("/v1/rerank", {"model": "toy", "query": "a secret" * 9, "documents": ["a", "b"]}),
}


@pytest.fixture
def service(tmp_path):
    text = load_text(TextSettings(tiny_llm(tmp_path / "toy")), torch.device("cpu"))
    return Service.open(
        shared_bundle(),
        f"lmdb:{tmp_path}/store",
        "cpu",
        ServiceOptions(EngineConfig(load_aware=False), text=text),
    )


def hits(client, service, key, path, body):
    """Tokens that one request finds in the prefix caches."""
    before = service.engine.stats().prefix_hit_tokens
    answer = client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return service.engine.stats().prefix_hit_tokens - before


@pytest.mark.parametrize("name", REQUESTS)
def test_a_prefix_is_found_with_the_same_key_only(service, name):
    path, body = REQUESTS[name]
    with live(service, api_keys=(ONE, TWO)) as client:
        first = hits(client, service, ONE, path, body)
        assert hits(client, service, TWO, path, body) == first
        for key in (ONE, TWO):
            assert hits(client, service, key, path, body) > first


def test_events_prewarm_and_deletion_forgets_for_the_keys_that_sent_them(service):
    event = {"user_id": "u", "item_id": HISTORY[0], "event_id": "e"}
    ask = "/v1/recommend", {"user": {"id": "u"}, "k": 3}
    with live(service, api_keys=(ONE, TWO)) as client:
        one, two = ({"Authorization": f"Bearer {key}"} for key in (ONE, TWO))
        posted = client.post("/v1/events", json={"events": [event], "warm": True}, headers=one)
        assert posted.json()["warmed"] == 2
        while service.engine.stats().background:
            time.sleep(0.01)
        assert hits(client, service, TWO, *ask) == 0 < hits(client, service, ONE, *ask)
        assert client.delete("/v1/users/u", headers=two).status_code == 204
        assert service.engine.stats().pages_cached == 0, "under both salts"


def test_one_key_has_no_salt_and_a_salt_says_nothing_of_its_key():
    assert AccessKeys((ONE,)).salts() == {} == AccessKeys((ONE, ONE)).salts()
    salts = AccessKeys((ONE, TWO)).salts()
    assert len(set(salts.values())) == 2 and {len(salt) for salt in salts.values()} == {16}
    assert salts != AccessKeys((ONE, TWO)).salts(), "new in each process"


@pytest.mark.parametrize("keys", [(ONE, TWO), (ONE,)])
def test_a_drafter_learns_from_outputs_of_the_same_key_only(service, keys):
    body = {
        "model": "toy",
        "prompt": "a prompt",
        "max_tokens": 48,
        "temperature": 0.9,
        "seed": 3,
        "speculation": {"drafter": "suffix"},
    }

    def ask(client, key):
        answer = client.post(
            "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        )
        assert answer.status_code == 200, answer.text
        said = answer.json()
        metrics = said["metrics"]["speculative_decoding"]
        return said["choices"][0]["text"], metrics["num_accepted_tokens"], metrics["num_drafts"]

    with live(service, api_keys=keys) as client:
        fresh = ask(client, ONE)
        learned = ask(client, ONE)
        assert learned[0] == fresh[0] and learned[1] > fresh[1]
        for key in keys[1:]:
            assert ask(client, key) == fresh, "as on a server that has written nothing yet"
            assert ask(client, key)[1] > fresh[1]
