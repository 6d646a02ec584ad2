"""Rules that the message types cannot say, as JSON Schema: which fields go together, and how.

A rule is a pattern that a body must not match; `not: {anyOf: PATTERNS}` keeps the fields where
generators of clients look for them. Some rules compare values, which JSON Schema cannot do: they
are in the fields' descriptions. `recserve.server.openapi` adds all to its components.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from recserve.schemas import chat_messages, encoding, scoring, text
from recserve.schemas.neutral import refused_fields

Schema = dict[str, Any]
TEXT_KINDS = (text.CompletionRequest, text.ChatRequest)
SCORING_KINDS = (scoring.RerankRequest, scoring.GenerativeScoringRequest)
ENCODING_KINDS = (encoding.EmbeddingsRequest, encoding.TokenizeRequest)
NULL: Schema = {"type": "null"}
GIVEN: Schema = {"not": NULL}
TRUE: Schema = {"const": True}
NOT_TRUE: Schema = {"not": TRUE}
EMPTY: Schema = {"type": ["array", "null"], "maxItems": 0}


def has(**fields: Schema) -> Schema:
    """Returns the pattern of a body that has all fields, with these values."""
    return {"type": "object", "required": list(fields), "properties": fields}


def lacks(*names: str) -> Schema:
    """Returns the pattern of a body where each of the fields is absent or null."""
    return {"type": "object", "properties": dict.fromkeys(names, NULL)}


def both(*patterns: Schema) -> Schema:
    """Returns the pattern of a body that matches all patterns."""
    return {"allOf": list(patterns)}


def unless(pattern: Schema) -> Schema:
    """Returns the pattern of a body that does not match."""
    return {"not": pattern}


# A stream whose prompt is scored, and what a stream's options need.
NO_STREAM = unless(has(stream=TRUE))
STREAM_OPTIONS = both(has(stream_options=GIVEN), NO_STREAM)
NOT_GREEDY = both(
    has(speculation=has(verifier={"const": "greedy"})),
    unless(has(temperature={"const": 0})),
)
# What a text must be, by the field that says it.
SOME: Schema = {"type": "array", "items": {}, "minItems": 1}
CONSTRAINTS: dict[str, Schema] = {
    "response_format": has(response_format=has(type={"enum": ["json_object", "json_schema"]})),
    **{name: has(**{name: SOME if name == "guided_choice" else GIVEN}) for name in text.GUIDED},
    **{
        f"structured_outputs.{name}": has(
            structured_outputs=has(**{name: {"choice": SOME, "json_object": TRUE}.get(name, GIVEN)})
        )
        for name in text.STRUCTURED
    },
}
CONSTRAINT_RULES = (
    *(both(*pair) for pair in itertools.combinations(CONSTRAINTS.values(), 2)),
    both(has(ignore_eos=TRUE), {"anyOf": list(CONSTRAINTS.values())}),
    both(
        has(structured_outputs=has(blanks={"type": "number", "exclusiveMinimum": 0})),
        unless({"anyOf": [CONSTRAINTS[name] for name in text.JSON_FIELDS]}),
    ),
)
CALLS_TOOLS = both(has(tools=SOME), unless(has(tool_choice={"const": "none"})))
TOOL_RULES = (
    both(
        has(tool_choice={"anyOf": [{"const": "required"}, {"type": "object"}]}),
        unless(has(tools=SOME)),
    ),
    both(
        CALLS_TOOLS,
        {"anyOf": [rule for name, rule in CONSTRAINTS.items() if name != "response_format"]},
    ),
    both(CALLS_TOOLS, has(ignore_eos=TRUE)),
)
TEXTS: Schema = {"type": "array", "items": {"type": ["string", "array"]}}


def _too_many_texts() -> list[Schema]:
    """Returns the patterns of more prompts times n than a request may have."""
    one_each = both({"properties": {"n": {"enum": [None, 1]}}})
    most = {n: text.MAX_CHOICES // n for n in range(1, text.MAX_N + 1)}
    return [
        both(
            has(prompt={**TEXTS, "minItems": count + 1}),
            one_each if n == 1 else has(n={"const": n}),
        )
        for n, count in most.items()
    ]


def _other_best_of() -> list[Schema]:
    """Returns the patterns of a `best_of` that differs from n."""
    integer: Schema = {"type": "number"}
    return [
        both(has(best_of={**integer, "not": {"const": 1}}), lacks("n")),
        *(
            has(best_of={**integer, "not": {"const": n}}, n={"const": n})
            for n in range(1, text.MAX_N + 1)
        ),
    ]


RULES: dict[str, Sequence[Schema]] = {
    "RecommendRequest": (
        lacks("user", "history"),
        both(has(exclude_shown=GIVEN), lacks("user")),
        both(has(discount_shown=GIVEN), lacks("user")),
        both(has(shown_ids={"type": "array", "items": {}, "minItems": 1}), lacks("user")),
        both(has(beam_width={"type": "number", "maximum": 9}), unless(has(k={}))),
    ),
    "RankRequest": (lacks("user", "history"),),
    "Quota": (lacks("new_within_s", "filter"),),
    "Exclusions": (has(seen_within_s=GIVEN, seen={"const": False}),),
    "EventInput": (lacks("item_id", "correction"),),
    "CompletionRequest": (
        STREAM_OPTIONS,
        NOT_GREEDY,
        *CONSTRAINT_RULES,
        has(stream=TRUE, prompt_logprobs=GIVEN),
        has(stream=TRUE, echo=TRUE, logprobs=GIVEN),
        *_too_many_texts(),
        *_other_best_of(),
    ),
    "ChatRequest": (
        STREAM_OPTIONS,
        NOT_GREEDY,
        both(has(top_logprobs=GIVEN), unless(has(logprobs=TRUE))),
        has(continue_final_message=TRUE, add_generation_prompt=TRUE),
        *CONSTRAINT_RULES,
        *TOOL_RULES,
    ),
    "ResponseFormat": (
        both(has(type={"const": "json_schema"}), lacks("json_schema")),
        both(has(json_schema=GIVEN), unless(has(type={"const": "json_schema"}))),
    ),
    "ChatMessage": (
        has(
            tool_calls={"type": "array", "items": {}, "minItems": 1},
            role={"not": {"const": "assistant"}},
        ),
        {"properties": {"content": NULL, "tool_calls": EMPTY}},
    ),
    "TokenizeRequest": (lacks("prompt", "messages"), has(prompt=GIVEN, messages=GIVEN)),
    "InferTensor": (
        both(unless(has(data={})), unless(has(parameters=has(binary_data_size=GIVEN)))),
        has(data={}, parameters=has(binary_data_size=GIVEN)),
    ),
}
IN_WORDS = {
    ("RecommendRequest", "beam_width"): "At least k.",
    ("CompletionRequest", "min_tokens"): "At most the most output tokens.",
    ("ChatRequest", "min_tokens"): "At most the most output tokens.",
    ("ChatRequest", "tools"): "Each function has another name.",
    ("ChatRequest", "tool_choice"): "A named function is one of the tools.",
}


def _only(value: Any) -> Schema:
    """Returns the schema of one value. Generators know no enumeration of several types."""
    if value is None:
        return NULL
    if isinstance(value, list):
        size = len(value)
        items = _only(value[0]) if value else {}
        return {"type": "array", "items": items, "minItems": size, "maxItems": size}
    if isinstance(value, dict):
        fields = {name: _only(inner) for name, inner in value.items()}
        return {
            "type": "object",
            "properties": fields,
            "required": list(value),
            "additionalProperties": False,
        }
    return {"const": value}


def one_of(*values: Any) -> Schema:
    """Returns the schema of one of the values."""
    return {"anyOf": [_only(value) for value in values]}


def add_rules(components: dict[str, Schema], min_temperature: float) -> None:
    """Adds to the schemas of requests what the checks after decoding ask for.

    Args:
        components: Schemas by name; they are changed.
        min_temperature: Least temperature above 0.
    """
    components["Filter"] = FILTER
    for name in ("RecommendRequest", "SimilarRequest", "Quota"):
        fields = components[name]["properties"]
        fields["filter"] = {"anyOf": [FILTER_REF, NULL], "default": None}
    for name, patterns in RULES.items():
        components[name]["not"] = {"anyOf": list(patterns)}
    for (name, field), words in IN_WORDS.items():
        components[name]["properties"][field]["description"] = words
    for kind in (*TEXT_KINDS, *SCORING_KINDS, *ENCODING_KINDS):
        fields = components[kind.__name__]["properties"]
        for field, (neutral, reason) in refused_fields(kind).items():
            words = f"{reason[:1].upper()}{reason[1:]}."
            values = one_of(None, *neutral)["anyOf"]
            fields[field] = {"default": None, "description": words, "anyOf": values}
    for kind in TEXT_KINDS:
        fields = components[kind.__name__]["properties"]
        fields["temperature"]["anyOf"][0]["not"] = {
            "exclusiveMinimum": 0,
            "exclusiveMaximum": min_temperature,
        }
        fields["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": TOKEN_ID}
    arguments = components["ToolFunction"]["properties"]["parameters"]["anyOf"][0]
    arguments["properties"] = {"type": {"const": "object"}}
    for field, allowed in chat_messages.REFUSED.items():
        components["ChatMessage"]["properties"][field] |= one_of(*allowed)
    fields = components["GenerativeScoringRequest"]["properties"]
    fields["item_first"] |= {"const": False}
    fields["label_token_ids"]["uniqueItems"] = True
    fields["items"]["items"]["anyOf"][0]["minLength"] = 1
    for name, field, most in (
        ("CompletionRequest", "prompt", text.MAX_CHOICES),
        ("EmbeddingsRequest", "input", encoding.MAX_INPUTS),
    ):
        _part_texts(components[name]["properties"][field], most)
    for name in ("InputParameters", "OutputParameters"):
        components[name]["properties"]["shared_memory_region"] |= one_of(None)
    components["OutputParameters"]["properties"]["classification"] |= one_of(None, 0)
    _use_common_patterns(components)


def _operands(*others: Schema) -> Schema:
    """Returns the schema of the operands of a comparison: the field, then the others."""
    size = 1 + len(others)
    fields = [{"type": "string"}, *others]
    return {"type": "array", "prefixItems": fields, "minItems": size, "maxItems": size}


FILTER_REF: Schema = {"$ref": "#/components/schemas/Filter"}
LITERAL: Schema = {"type": ["string", "number", "boolean", "null"]}
PARTS: Schema = {"type": "array", "items": FILTER_REF, "minItems": 1}
FILTER: Schema = {
    "title": "Filter",
    "description": "A condition on items: one operator. At most 8 levels and 64 conditions.",
    "type": "object",
    "properties": {
        "and": PARTS,
        "or": PARTS,
        "not": FILTER_REF,
        "eq": _operands(LITERAL),
        "in": _operands({"type": "array", "items": LITERAL, "minItems": 1, "maxItems": 1000}),
        "range": _operands(LITERAL, LITERAL),
    },
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
}
TOKEN_ID = (
    "^(0|[1-9][0-9]{0,8}|1[0-9]{9}|20[0-9]{8}|21[0-3][0-9]{7}|214[0-6][0-9]{6}|2147[0-3][0-9]{5}"
    "|21474[0-7][0-9]{4}|214748[0-2][0-9]{3}|2147483[0-5][0-9]{2}|21474836[0-3][0-9]|214748364[0-8])$"
)
"""The digits of a token id: 0 to 2^31."""


def _part_texts(schema: Schema, most: int) -> None:
    """Parts the schema of inputs: a text, one list of token ids, or a list of either."""
    (array,) = (one for one in schema["anyOf"] if one["type"] == "array")
    kinds = array["items"]["anyOf"]
    tokens = [one for one in kinds if one["type"] == "integer"]
    texts = [one for one in kinds if one["type"] != "integer"]
    schema["anyOf"] = [
        {"type": "string"},
        {"type": "array", "items": tokens[0], "minItems": 1},
        {"type": "array", "items": {"anyOf": texts}, "minItems": 1, "maxItems": most},
    ]


def _use_common_patterns(schema: Any) -> None:
    """Writes the end of a pattern as JSON Schema knows it: Python's \\Z is a Z elsewhere."""
    if isinstance(schema, dict):
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            schema["pattern"] = pattern.replace(r"\Z", "$")
        schema = list(schema.values())
    for inner in schema if isinstance(schema, list) else ():
        _use_common_patterns(inner)
