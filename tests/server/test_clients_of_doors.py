"""Whatever door a request comes through: the engine and the threads learn who sends it."""

import pytest
import torch

from recserve.core.client import LOCAL, Client
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.schemas.api import OPERATIONS, Api, parameters_of
from recserve.server.access import AccessKeys
from recserve.server.threads import FairThreads
from recserve.service import Service, ServiceOptions
from recserve.service.text.loader import TextSettings, load_text
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle
from tests.support.tiny_llm import tiny_llm

KEYS = "the-first-key-of-two", "the-second-key-of-two"
SALTS = {key.encode(): key[:9].encode() for key in KEYS}
ITEMS = [f"item{number:06d}" for number in (3, 7, 31)]
ONE_ITEM = {"history": ITEMS, "candidates": [{"item_id": ITEMS[0]}]}
FILTERED = {"history": ITEMS, "filter": {"not": {"eq": ["item_id", "x"]}}}
EVENT = {"user_id": "u", "item_id": ITEMS[0]}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def tensor(name):
    return {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [ITEMS[0]]}


# Bodies of each operation that brings queries to the engine.
BODIES = {
    "recommend": [{"history": ITEMS, "k": 3}, FILTERED, {"user": {"id": "u"}}],
    "rank": [ONE_ITEM],
    "rank_batch": [{"requests": [ONE_ITEM] * 2}, {"requests": [ONE_ITEM] * 9}],
    "infer/recommend": [{"inputs": [tensor("history")]}],
    "infer/rank": [{"inputs": [tensor("history"), tensor("candidates")]}],
    "add_events": [{"events": [EVENT], "warm": True}],
    "complete": [
        {"prompt": ["a", "b"], "max_tokens": 2},
        {"prompt": "a", "max_tokens": 2, "stream": True},
        {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1},
    ],
    "chat": [CHAT, {**CHAT, "stream": True}],
    "rerank": [{"query": "a", "documents": ["b"]}],
    "rerank_v2": [{"query": "a", "documents": ["b"], "model": "toy"}],
    "generative_scoring": [{"query": "a", "items": ["b"], "label_token_ids": [1, 2]}],
    "embeddings": [{"input": ["a", "b"]}],
}
NO_QUERIES = {
    "similar": [{"item_ids": ITEMS}],
    "tokenize": [{"prompt": "a"}],
    "detokenize": [{"tokens": [1]}],
    "put_items": [{"items": [{"item_id": ITEMS[0]}]}],
    "rollback_items": [{"catalog_version": "unknown"}],
}
PAIRED = [
    {"name": use, "use": use, "mode": "paired", "arms": [{"name": "a"}, {"name": "b"}]}
    for use in ("recommend", "rank")
]


@pytest.fixture(scope="module", params=["plain", "experiments"])
def client(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    text = load_text(TextSettings(tiny_llm(folder / "toy")), torch.device("cpu"))
    journal = folder / "journal"
    options = ServiceOptions(EngineConfig(load_aware=False), text=text, journal=journal)
    service = Service.open(shared_bundle(), f"lmdb:{folder}/store", "cpu", options)
    experiments = PAIRED if request.param == "experiments" else []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AccessKeys, "salts", lambda keys: SALTS)
        with live(service, api_keys=KEYS, experiments=experiments) as running:
            yield running


@pytest.fixture
def seen(monkeypatch):
    """Who is named to the engine and to the threads: pairs of the method and the client."""
    calls = []

    def watch(kind, name):
        method = getattr(kind, name)

        def noted(self, what, client=LOCAL, *more):
            calls.append((name, client))
            return method(self, what, client, *more)

        monkeypatch.setattr(kind, name, noted)

    watch(Engine, "submit_all")
    watch(Engine, "check_queue")
    watch(FairThreads, "submit")
    return calls


DOORS = [
    door
    for row in OPERATIONS.values()
    if not (row.admin or row.open)
    for door in ([f"infer/{name}" for name in row.queue] if row is Api.infer else [row.name])
]


@pytest.mark.parametrize("door", DOORS)
def test_every_door_says_who_sends_a_request(client, seen, door):
    """One that forgets it gives all clients one share and one cache."""
    name, _, model = door.partition("/")
    row = OPERATIONS[name]
    bodies = [None] if row.body is None else (BODIES | NO_QUERIES)[door]
    parameters = dict.fromkeys(parameters_of(row.path), model or "u")
    path = row.path.replace(":path}", "}").format_map(parameters)
    for body in bodies:
        for key in KEYS:
            seen.clear()
            headers = {"Authorization": f"Bearer {key}"}
            answer = client.request(row.method, path, json=body, headers=headers)
            if door in BODIES:
                assert answer.status_code == 200, answer.text
                assert "submit_all" in dict(seen), body
            assert {one for _, one in seen} <= {Client(key.encode(), SALTS[key.encode()])}


def test_a_caller_in_this_process_is_no_client(client, seen):
    service = client.app.state.lifecycle.service
    service.recommend({"history": ITEMS})
    service.rank(ONE_ITEM)
    service.add_events({"events": [EVENT], "warm": True})
    assert {one for _, one in seen} == {LOCAL} and len(seen) == 4
