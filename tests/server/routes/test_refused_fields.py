"""A wrong field is refused by its place and bound, over HTTP and from Python in the same words."""

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
    "rank": RANKING,
    "rank_batch": {"requests": [RANKING]},
    "infer": {"inputs": [TENSOR], "parameters": {}},
    "add_events": {"events": [{"user_id": "u", "item_id": ITEM}]},
    "put_items": {"items": [{"item_id": ITEM}]},
    "rollback_items": {"catalog_version": "v"},
    "complete": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "rerank": {"query": "a", "documents": ["b"]},
    "rerank_v2": {"query": "a", "documents": ["b"]},
    "generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "embeddings": {"input": "a"},
    "tokenize": {"prompt": "a"},
    "detokenize": {"tokens": [1]},
}
# Clients of OpenAI, vLLM and Jina know 400.
KNOW_400 = ("complete", "chat", "rerank", "generative_scoring", "embeddings")
IN_PYTHON = ("recommend", "rank", "add_events", "put_items")
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
    yield ({}, "object") if "object" not in types else ("text", "str")
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


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_field_is_named_with_its_bound(client, name):
    row, service = OPERATIONS[name], client.app.state.lifecycle.service
    path = row.path.format_map(dict.fromkeys(parameters_of(row.path), "recommend"))
    neutral = refused_fields(row.body)
    for body, place, code, word in spoilt(
        client.schemas, client.schemas[row.body.__name__], BODIES[name]
    ):
        if place[0] in neutral:
            continue
        param = ".".join(place)
        answer = client.request(row.method, path, json=body)
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
