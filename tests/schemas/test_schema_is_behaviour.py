"""A body that the OpenAPI schema allows is not refused, and the other way round.

Bodies are drawn from the schemas and spoilt. What depends on data or models is left out: the model
of these tests takes every name, token and length.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from jsonschema import Draft202012Validator, FormatChecker

from recserve.config import ServerConfig
from recserve.drafters.none import NoDrafter
from recserve.features.catalog.filters import MAX_VALUES, FilterError, ItemFilters
from recserve.schemas import admin, encoding, events, inference, items, scoring, text
from recserve.schemas.neutral import refused_fields
from recserve.schemas.numbers import exact_number
from recserve.server.app import create_app
from recserve.server.binary_tensors import check_outputs, read_request
from recserve.server.body_decoder import decode
from recserve.service.text.model import TextModel
from recserve.service.text.prompts import name_texts, plan_chat, plan_completion
from tests.support.constrained_texts import compiled
from tests.support.schema_bodies import Bodies


class AnyTokenizer:
    """Each text has one token."""

    template = SimpleNamespace(render=lambda *_: "x", source='{{ tools }}<tool_call>"arguments')

    @staticmethod
    def encode(*_: object) -> list[int]:
        return [1]

    decode = staticmethod(lambda _: "x")
    min_tokens = staticmethod(lambda _: 1)
    hidden = staticmethod(lambda _: None)
    spelling = SimpleNamespace(num_open=lambda _: 0)


CPU = torch.device("cpu")


class AnyName(TextModel):
    """A model that takes every name."""

    def check_name(self, name: str | None) -> None:
        return None

    def constrain(self, *_: object, cached: bool = False) -> None:
        return None

    def exceeded(self, *_: object) -> Exception:
        return OfServer()


MODEL = AnyName("a", AnyTokenizer, 2**31 + 1, (), 2**31, 1, CPU, {"none": NoDrafter()})


class OfServer(Exception):
    """The refusal depends on the server, or compares two numbers."""


def check_tokenize(body: encoding.TokenizeRequest) -> None:
    body.check()
    for place, message in enumerate(body.messages or ()):
        message.check(f"messages[{place}]")


def check_embeddings(body: encoding.EmbeddingsRequest) -> None:
    body.check()
    name_texts("input", body.input, encoding.MAX_INPUTS)


class AnyField:
    """Names of fields that a catalogue has: all."""

    def __contains__(self, name: object) -> bool:
        return True


def check_filter(tree: Any) -> None:
    filters = object.__new__(ItemFilters)
    filters.fields = AnyField()
    try:
        filters.key(tree)
    except FilterError as error:
        if str(error).startswith("at most"):
            raise OfServer from None
        raise items.InvalidRequest("filter", str(error)) from None


def check_item_request(body: items.RecommendRequest | items.RankRequest) -> None:
    """What the service checks before it needs a catalogue."""
    if body.user is None and body.history is None:
        raise items.MissingField("user", "is required without a history")
    if isinstance(body, items.RecommendRequest):
        if (body.exclude_shown or body.discount_shown or body.shown_ids) and body.user is None:
            raise items.MissingField("user", "is required with what was shown")
        if body.filter is not None:
            check_filter(body.filter)
        for quota in [] if body.diversity is None else body.diversity.quotas:
            if quota.new_within_s is None and quota.filter is None:
                raise items.MissingField("diversity.at_least", "new_within_s or filter")
            if quota.filter is not None:
                check_filter(quota.filter)
        if body.beam_width is not None and body.beam_width < body.k:
            raise items.InvalidRequest("beam_width", "at least k")
        if body.exclude.seen_within_s is not None and not body.exclude.seen:
            raise items.InvalidRequest("exclude.seen_within_s", "expected seen = true with it")


def check_similar(body: items.SimilarRequest) -> None:
    check_item_request(body.as_recommend())


def check_scoring(body: scoring.GenerativeScoringRequest) -> None:
    body.check()
    if "" in body.items:
        raise items.InvalidRequest("items", "is empty; an item needs at least one token")


def check_events(body: events.EventsRequest) -> None:
    """A wrong event is listed in the answer; it does not refuse the body."""
    if any(one.correction not in (None, "replace", "remove") for one in body.events):
        raise OfServer


def check_infer(body: inference.InferRequest) -> None:
    check_outputs(body.outputs or ())
    try:
        read_request(msgspec.json.encode(body), [])
    except items.InvalidRequest as error:
        if "that are left after the JSON part" in str(error):
            raise OfServer from None
        raise


CHECKS: dict[type[msgspec.Struct], Callable[[Any], object]] = {
    text.CompletionRequest: lambda body: compiled(lambda: plan_completion(body, MODEL)),
    text.ChatRequest: lambda body: compiled(lambda: plan_chat(body, MODEL)),
    scoring.RerankRequest: scoring.RerankRequest.check,
    scoring.GenerativeScoringRequest: check_scoring,
    encoding.EmbeddingsRequest: check_embeddings,
    encoding.TokenizeRequest: check_tokenize,
    encoding.DetokenizeRequest: id,
    items.RecommendRequest: check_item_request,
    items.SimilarRequest: check_similar,
    items.RankRequest: check_item_request,
    items.ItemsRequest: id,
    items.RollbackRequest: id,
    events.EventsRequest: check_events,
    admin.BundleLoadRequest: id,
    inference.InferRequest: check_infer,
}
# Fields whose values depend on the server, and comparisons that are in the fields' descriptions.
OF_SERVER = ("speculation", "speculation.drafter", "speculation.verifier", "bad_words")
DRAWS = 40
IN_WORDS = ("min_tokens", "beam_width", "tool_choice.function.name")


@pytest.fixture(scope="module")
def components() -> dict[str, Any]:
    return create_app(ServerConfig(llm="given")).openapi()["components"]["schemas"]


def refusal(kind: type[msgspec.Struct], body: Any) -> str | None:
    """Returns the server's message to a body; None if it is taken. Raises OfServer."""
    decoder = msgspec.json.Decoder(kind, float_hook=exact_number)
    try:
        CHECKS[kind](decode(decoder, json.dumps(body).encode()))
    except items.InvalidRequest as error:
        of_server = error.param in OF_SERVER and "greedy needs" not in str(error)
        of_server |= "occurs twice" in str(error) or "template does not write" in str(error)
        if of_server or error.param in IN_WORDS:
            raise OfServer from None
        return str(error)
    return None


def validator(components: dict[str, Any], kind: type[msgspec.Struct]) -> Draft202012Validator:
    schema = {**components[kind.__name__], "components": {"schemas": components}}
    checker = FormatChecker(formats=())
    checker.checks("date-time")(lambda value: not isinstance(value, str) or value.endswith("Z"))
    return Draft202012Validator(schema, format_checker=checker)


@pytest.mark.parametrize("kind", CHECKS, ids=lambda kind: kind.__name__)
def test_what_the_schema_allows_is_not_refused(components, kind):
    rules, bodies = validator(components, kind), Bodies(components, seed=len(kind.__name__))
    allowed = 0
    for _ in range(DRAWS):
        drawn = [bodies.body({"$ref": f"/{kind.__name__}"}) for _ in range(12)]
        fine = next(filter(rules.is_valid, drawn), drawn[0])
        for one in (drawn[0], fine, bodies.spoil(fine)):
            with contextlib.suppress(OfServer):
                message = refusal(kind, one)
                problems = sorted(error.message for error in rules.iter_errors(one))
                allowed += not problems
                assert problems or message is None, f"allowed, and refused: {message}\n{one}"
                assert not problems or message, f"taken, and not allowed: {problems[0]}\n{one}"
    assert allowed > DRAWS / 4


def test_filters_are_described(components):
    """The operators, their operands, and the number of values."""
    rules, bodies = validator(components, items.RecommendRequest), Bodies(components, seed=1)
    allowed = 0
    for _ in range(300):
        tree = bodies.body({"$ref": "/Filter"})
        for one in (tree, bodies.spoil(tree)):
            with contextlib.suppress(OfServer):
                message = refusal(items.RecommendRequest, {"history": ["a"], "filter": one})
                fits = rules.is_valid({"history": ["a"], "filter": one})
                assert fits == (message is None), (message, one)
                allowed += fits
    assert allowed > 100
    values = components["Filter"]["properties"]["in"]["prefixItems"][1]
    assert values["maxItems"] == MAX_VALUES


VALUES = (None, 0, 1, -1, 0.0, 1.0, 2, False, True, "", "none", "true", [], {}, ["text"])
BODIES = {
    text.CompletionRequest: {"prompt": "x"},
    text.ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    scoring.RerankRequest: {"query": "x", "documents": ["y"]},
    scoring.GenerativeScoringRequest: {"query": "x", "items": ["y"], "label_token_ids": [1]},
    encoding.EmbeddingsRequest: {"input": "x"},
    encoding.TokenizeRequest: {"prompt": "x"},
}


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_a_neutral_value_has_its_own_type(components, kind):
    """Zero is not false: a field without support takes its neutral values alone."""
    rules = validator(components, kind)
    names = refused_fields(kind)
    for name, value in itertools.product(sorted(names), VALUES):
        body = {**BODIES[kind], name: value}
        assert rules.is_valid(body) == (refusal(kind, body) is None), body
    for name in ("use_beam_search", "store", "add_generation_prompt"):
        if name in names:
            assert [refusal(kind, {**BODIES[kind], name: v}) for v in (0, 1, "", [])] == [
                f"{name}: {names[name][1]}"
            ] * 4
