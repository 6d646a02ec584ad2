"""Draws requests from an OpenAPI document: valid ones, damaged ones and nonsense."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from jsonschema import Draft202012Validator

Json = Any
STRINGS = ("", "x", "é", "\u202e", "\x00", "a/b", "..", "%00", "item000003", "😀" * 70)
NUMBERS = (0, -1, 1, 2**31, -(2**63), 2**63, 2**64, 0.5, -0.0, 1e308, 5.0)
ODD: tuple[Json, ...] = (None, True, [], {}, [[]], {"a": {}}, *STRINGS, *NUMBERS)
RAW = (b"", b"{", b"[]", b"null", b'"', b"\xff\xfe", b"{}{}", b'{"k": NaN}', b"[" * 20_000)
MATCHING = ("a-1", "7", "2026-01-01T00:00:00Z")  # strings that patterns ask for
MAX_DRAWS = 1000  # of a value that matches no forbidden pattern
MOST = 4  # items of a drawn array or object


@dataclass(frozen=True)
class Operation:
    """A method of a path.

    Attributes:
        method: HTTP method.
        path: Path with parameters in braces.
        body: Schema of the body; None without one.
        query: Schemas of the query's parameters by name.
    """

    method: str
    path: str
    body: Json
    query: dict[str, Json]


@dataclass(frozen=True)
class DrawnRequest:
    """A request.

    Attributes:
        operation: What it calls.
        path: Path and query.
        content: The body; None without one.
        valid: Whether the body follows the schema.
    """

    operation: Operation
    path: str
    content: bytes | None
    valid: bool


class RequestSource:
    """Draws requests.

    Attributes:
        operations: All operations of the document.
        pool: Strings that mean something to the server, such as ids of items.
    """

    def __init__(self, document: Json, pool: Sequence[str], seed: int) -> None:
        self.document, self.pool = document, tuple(pool)
        self.draw = random.Random(seed)
        self.operations = list(_operations(document))

    def request(self, operation: Operation) -> DrawnRequest:
        """Returns a request: half of them are valid, a third is damaged, the rest is nonsense."""
        kind = self.draw.random()
        valid = kind < 0.5
        values = {name: self._text() for name in re.findall(r"\{(\w+)\}", operation.path)}
        path = re.sub(
            r"\{(\w+)\}", lambda found: quote(values[found[1]], safe="") or "x", operation.path
        )
        given = [
            f"{quote(name)}={quote(str(self.value(schema) if valid else self._odd()))}"
            for name, schema in operation.query.items()
            if self.draw.random() < 0.7
        ]
        path += f"?{'&'.join(given)}" if given else ""
        content = None
        if operation.body is not None:
            body = self.value(operation.body)
            if valid:
                content = json.dumps(body).encode()
            elif kind < 0.85:
                content = json.dumps(self._damaged(body)).encode()
            else:
                content = self.draw.choice((*RAW, json.dumps(self._odd()).encode()))
        return DrawnRequest(operation, path, content, valid)

    def _validator(self, schema: Json) -> Draft202012Validator:
        return Draft202012Validator({**schema, "components": self.document["components"]})

    def value(self, schema: Json, depth: int = 0) -> Json:
        """Returns a value that follows a schema."""
        draw = self.draw
        if "$ref" in schema:
            named = schema["$ref"].rpartition("/")[2]
            return self.value(self.document["components"]["schemas"][named], depth + 1)
        if "not" in schema:  # patterns that a value must not match
            rest = {name: one for name, one in schema.items() if name != "not"}
            forbidden = self._validator(schema["not"])
            for _ in range(MAX_DRAWS):
                found = self.value(rest, depth)
                if not forbidden.is_valid(found):
                    return found
            raise ValueError(f"no value in {MAX_DRAWS} draws is outside of {schema['not']}")
        if "anyOf" in schema:
            simple = [one for one in schema["anyOf"] if one.get("type") == "null"]
            choices = simple if depth > 6 and simple else schema["anyOf"]
            return self.value(draw.choice(choices), depth)
        if "const" in schema or "enum" in schema:
            return draw.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = draw.choice(kind)
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                low = schema.get("minItems", 0)
                most = min(schema.get("maxItems", MOST), low + (0 if depth > 6 else MOST))
                inner = schema.get("items") or {}
                fixed = [self.value(one, depth + 1) for one in schema.get("prefixItems", ())]
                more = draw.randint(low, most) - len(fixed) if inner else 0
                drawn = fixed + [self.value(inner, depth + 1) for _ in range(more)]
                if schema.get("uniqueItems"):
                    return [one for place, one in enumerate(drawn) if one not in drawn[:place]]
                return drawn
            case "string":
                return self._string(schema)
            case "integer":
                low = schema.get("minimum", -5)
                most = min(schema.get("maximum", 99), low + 60)
                return draw.choice((low, draw.randint(low, most)))
            case "number":
                low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
                most = min(schema.get("maximum", low + 5), low + 5)
                return low + draw.random() * (most - low) + 1e-6
            case "boolean":
                return draw.random() < 0.5
            case "null":
                return None
        return self._odd()

    def _object(self, schema: Json, depth: int) -> Json:
        found = {}
        fields = schema.get("properties", {})
        if schema.get("maxProperties") == 1:  # one of the fields; deep down one without fields
            flat = [name for name, inner in fields.items() if "$ref" not in json.dumps(inner)]
            name = self.draw.choice(flat if depth > 6 and flat else list(fields))
            return {name: self.value(fields[name], depth + 1)}
        for name, inner in fields.items():
            if name in schema.get("required", ()) or self.draw.random() < 0.4 / (1 + depth):
                found[name] = self.value(inner, depth + 1)
        more = schema.get("additionalProperties")
        if isinstance(more, dict):
            for _ in range(max(schema.get("minProperties", 0), self.draw.randint(0, 2))):
                found[self._string(schema.get("propertyNames", {}))] = self.value(more, depth + 1)
        return found

    def _string(self, schema: Json) -> str:
        low, most = schema.get("minLength", 0), min(schema.get("maxLength", 80), 80)
        if "pattern" in schema:
            return next(one for one in MATCHING if re.search(schema["pattern"], one))
        text = self._text()[:most]
        return text + "x" * (low - len(text))

    def _text(self) -> str:
        return self.draw.choice((*STRINGS, *self.pool, *self.pool, *self.pool))

    def _odd(self) -> Json:
        return self.draw.choice(ODD)

    def _damaged(self, value: Json) -> Json:
        """Returns a value with one part changed, removed, added or nested."""
        value = copy.deepcopy(value)
        places = list(_places(value))
        if not places:
            return self._odd()
        inside, name = self.draw.choice(places)
        match self.draw.randrange(4):
            case 0:
                inside[name] = self._odd()
            case 1:
                del inside[name]
            case 2:
                inside[name] = {"x": inside[name]}
            case 3:
                inside[name] = [inside[name]] * self.draw.choice((1, 2, 300))
        if isinstance(value, dict) and self.draw.random() < 0.1:
            value["no-such-field"] = self._odd()
        return value


def _places(value: Json) -> Iterator[tuple[Json, Any]]:
    """Yields every place inside a value."""
    if not isinstance(value, dict | list):
        return
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in list(parts):
        yield value, name
        yield from _places(inner)


def _operations(document: Json) -> Iterator[Operation]:
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            content = said.get("requestBody", {}).get("content", {})
            query = {
                one["name"]: one.get("schema", {})
                for one in said.get("parameters", ())
                if one["in"] == "query"
            }
            body = content.get("application/json", {}).get("schema")
            yield Operation(method.upper(), path, body, query)
