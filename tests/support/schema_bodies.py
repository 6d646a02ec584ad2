"""Draws JSON bodies from a JSON schema, and spoils them."""

from __future__ import annotations

import random
import re
from typing import Any

Schema = dict[str, Any]
WORDS = (
    "a",
    "b c",
    "7",
    "true",
    "0",
    "é",
    "greedy",
    "sample",
    "2026-11-20T10:00:00Z",
    "user_id",
    "6h",
)
NUMBERS = (0, 1, 2, 3, 9, 10, 16, 50, -1, 0.5, 1.0, 1e-9, 2**31)
ANY = (None, False, True, 0, 1, -1, 1.0, 0.0, "", "x", "none", [], {}, ["text"], {"type": "text"})


class Bodies:
    """Draws bodies from the components of an OpenAPI description."""

    def __init__(self, components: dict[str, Schema], seed: int) -> None:
        self.components, self.draw = components, random.Random(seed)

    def body(self, schema: Schema) -> Any:
        """Returns a body that has the fields of the schema; rules between fields may be broken."""
        if "$ref" in schema:
            return self.body(self.components[schema["$ref"].rsplit("/", 1)[1]])
        if "anyOf" in schema:
            return self.body(self.draw.choice(schema["anyOf"]))
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.draw.choice(schema["enum"])
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = self.draw.choice(kind)
        if kind is None:
            return self.draw.choice(ANY)
        return getattr(self, f"_{kind}")(schema)

    def spoil(self, body: Any) -> Any:
        """Returns a copy with one value inside replaced by a value of any type."""
        if not isinstance(body, list | dict) or not body:
            return self.draw.choice(ANY)
        places = list(range(len(body))) if isinstance(body, list) else list(body)
        copy, place = body.copy(), self.draw.choice(places)
        deeper = isinstance(body[place], list | dict) and self.draw.random() < 0.6
        copy[place] = self.spoil(body[place]) if deeper else self.draw.choice(ANY)
        return copy

    def _object(self, schema: Schema) -> dict[str, Any]:
        if schema.get("maxProperties") == 1:
            name = self.draw.choice(list(schema["properties"]))
            return {name: self.body(schema["properties"][name])}
        required = schema.get("required", ())
        share = self.draw.choice((0.1, 0.3))
        fields = {
            name: self.body(inner)
            for name, inner in schema.get("properties", {}).items()
            if name in required or self.draw.random() < share
        }
        more = schema.get("additionalProperties")
        if isinstance(more, dict):
            for name in self.draw.sample(WORDS, self.draw.randrange(3)):
                fields[name] = self.body(more)
        return fields

    def _array(self, schema: Schema) -> list[Any]:
        if "prefixItems" in schema:
            return [self.body(inner) for inner in schema["prefixItems"]]
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", least + 2), least + 2)
        count = self.draw.randint(least, most)
        return [self.body(schema.get("items", {})) for _ in range(count)]

    def _string(self, schema: Schema) -> str:
        words = [
            word
            for word in (*WORDS, "")
            if schema.get("minLength", 0) <= len(word) <= schema.get("maxLength", 99)
            and re.search(schema.get("pattern", ""), word)
        ]
        return self.draw.choice(words)

    def _number(self, schema: Schema) -> float:
        low, high = schema.get("minimum", -(2**31)), schema.get("maximum", 2**31)
        above = schema.get("exclusiveMinimum", -(2.0**31))
        bounds = (schema.get("minimum", 0), schema.get("maximum", 1))
        return self.draw.choice(
            [one for one in (*NUMBERS, *bounds) if low <= one <= high and one > above]
        )

    def _integer(self, schema: Schema) -> float:
        while (number := self._number(schema)) != int(number):
            pass
        return number

    def _boolean(self, _: Schema) -> bool:
        return self.draw.random() < 0.5

    def _null(self, _: Schema) -> None:
        return None
