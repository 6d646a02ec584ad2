"""A wrong field is refused by its place and bound, over HTTP and from Python; no body is a 500."""

import json
import random

import pytest
import torch

from recserve.engine.engine_config import EngineConfig
from recserve.schemas.api import OPERATIONS, parameters_of
from recserve.schemas.items import InvalidRequest
from recserve.schemas.neutral import refused_fields
from recserve.service import Service, ServiceOptions
from recserve.service.text.loader import TextSettings, load_text
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle
from tests.support.tiny_llm import tiny_llm

ITEM = "item000003"
RANKING = {"history": [ITEM], "candidates": [{"item_id": ITEM}]}
TENSOR = {"name": "history", "shape": [1, 1], "datatype": "BYTES", "data": [ITEM]}
# Valid bodies. All their fields are spoilt, and those of objects inside them.
BODIES = {
    "recommend": {"history": [ITEM], "exclude": {}, "diversity": {}},
    "similar": {"item_ids": [ITEM], "exclude": {}, "diversity": {}},
    "rank": RANKING,
    "rank_batch": {"requests": [RANKING]},
    "infer": {"inputs": [TENSOR], "parameters": {}},
    "add_events": {"events": [{"user_id": "u", "item_id": ITEM}]},
    "put_items": {"items": [{"item_id": ITEM}]},
    "rollback_items": {"catalog_version": "v"},
    "complete": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "rerank": {"query": "a", "documents": ["b"]},
    "rerank_v2": {"query": "a", "documents": ["b"]},
    "generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "embeddings": {"input": "a"},
    "tokenize": {"prompt": "a"},
    "detokenize": {"tokens": [1]},
}
# Clients of OpenAI, vLLM and Jina know 400.
KNOW_400 = ("complete", "chat", "rerank", "generative_scoring", "embeddings")
IN_PYTHON = ("recommend", "similar", "rank", "add_events", "put_items", "rollback_items")
SHORT_FORMS = ("user", "candidates")  # of Python, which takes more there


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fields")
    text = load_text(TextSettings(tiny_llm(folder / "toy")), torch.device("cpu"))
    options = ServiceOptions(EngineConfig(load_aware=False), journal=folder / "items", text=text)
    with live(Service.open(shared_bundle(), f"lmdb:{folder}/store", "cpu", options)) as running:
        running.schemas = running.get("/openapi.json").json()["components"]["schemas"]
        yield running


def forms_of(schemas, schema):
    """Returns what a field may be, without references."""
    if "$ref" in schema:
        return forms_of(schemas, schemas[schema["$ref"].rsplit("/", 1)[1]])
    if "anyOf" in schema and "type" not in schema:
        return [form for one in schema["anyOf"] for form in forms_of(schemas, one)]
    return [schema]


def wrong_values(forms):
    """Yields wrong values by kind, and the word that the message has for each."""
    types = {form.get("type") for form in forms}
    if None in types or types == {"null"}:
        return
    if "object" not in types:
        yield {}, "object"
    else:
        yield ("text", "str") if "string" not in types else (1, "int")
    one = next(form for form in forms if form["type"] != "null")
    if len(types - {"null"}) == 1 and "not" not in one:
        for name, spoil in (
            ("minimum", lambda bound: bound - 1),
            ("maximum", lambda bound: bound + 1),
            ("minLength", lambda bound: "x" * (bound - 1)),
            ("maxLength", lambda bound: "x" * (bound + 1)),
            ("minItems", lambda bound: []),
        ):
            if name in one:
                yield spoil(one[name]), str(one[name])


def spoilt(schemas, schema, body, place=()):
    """Yields bodies with one wrong field, its place, the code, and a word of the message."""
    for name in schema["required"]:
        yield {k: v for k, v in body.items() if k != name}, (*place, name), "missing_field", ""
    if not schema.get("additionalProperties", True):
        yield body | {"no_such": 1}, (*place, "no_such"), "unknown_field", ""
    for name, field in schema["properties"].items():
        forms = forms_of(schemas, field)
        for value, word in wrong_values(forms):
            yield body | {name: value}, (*place, name), "out_of_range", word
        if isinstance(body.get(name), dict):
            (inner,) = (form for form in forms if "properties" in form)
            for own, *rest in spoilt(schemas, inner, body[name], (*place, name)):
                yield body | {name: own}, *rest


def path_of(row):
    return row.path.format_map(dict.fromkeys(parameters_of(row.path), "recommend"))


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_field_is_named_with_its_bound(client, name):
    row, service = OPERATIONS[name], client.app.state.lifecycle.service
    neutral = refused_fields(row.body)
    for body, place, code, word in spoilt(
        client.schemas, client.schemas[row.body.__name__], BODIES[name]
    ):
        if place[0] in neutral:
            continue
        param = ".".join(place)
        answer = client.request(row.method, path_of(row), json=body)
        assert answer.status_code == (400 if name in KNOW_400 else 422), (body, answer.text)
        error = answer.json()["error"]
        if name == "infer":
            assert error.startswith(f"{param}: ") and word in error, (body, error)
            continue
        assert (error["code"], error["param"]) == (code, param), (body, error)
        assert error["message"].startswith(f"{param}: ") and word in error["message"], (body, error)
        if name in IN_PYTHON and place[0] not in SHORT_FORMS:
            with pytest.raises(InvalidRequest) as refused:
                getattr(service, name)(body)
            assert refused.value.param == param and word in str(refused.value)


def drawn_value(rng, depth=0):
    """Any JSON value, sizes and depths a client should not send among them."""
    kinds = [None, True, 0, -1, 1e308, 10**30, "", "x" * 300, "u\u0000", "\ud83d\ude00", 3.5, [[]]]
    if depth > 3 or rng.random() < 0.6:
        return rng.choice(kinds)
    if rng.random() < 0.5:
        return [drawn_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = ["id", "item_id", "eq", "and", "range", "price", "role", "content", "text", "tree", "0"]
    return {rng.choice(keys): drawn_value(rng, depth + 1) for _ in range(rng.randrange(4))}


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BODIES)
def test_no_body_is_an_internal_error(client, name, count):
    """So many bodies per route: a valid one with one to three fields replaced by drawn values."""
    rng, row, statuses = random.Random(name), OPERATIONS[name], []
    schema = client.schemas[row.body.__name__]
    names = sorted(schema["properties"].keys() - {"max_tokens"})  # few tokens take no time
    for number in range(count):
        body = json.loads(json.dumps(BODIES[name]))
        parts = [one for one in body.values() if isinstance(one, list) and isinstance(one[0], dict)]
        if parts and number % 3 == 0:  # a field of an event, an item, a candidate, a message
            part = rng.choice(parts)[0]
            part[rng.choice([*part, "price"])] = drawn_value(rng)
        else:
            chosen = rng.sample(names, min(len(names), rng.randint(1, 3)))
            body |= {field: drawn_value(rng) for field in chosen}
        answer = client.request(row.method, path_of(row), content=json.dumps(body))
        assert answer.status_code in (200, 400, 404, 422, 504), (body, answer.text)
        if answer.is_error:
            error = answer.json()["error"]
            assert name == "infer" or set(error) == {"message", "type", "param", "code"}
        statuses.append(answer.status_code)
    assert {400, 422} & {*statuses}
