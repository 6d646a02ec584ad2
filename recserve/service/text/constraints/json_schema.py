"""JSON schemas of constraints: bounds, and what the grammar of a schema would let pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_DEPTH = 96  # of objects and lists in a schema
MAX_NODES = 100_000

_SCHEMAS = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("additionalItems", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OPTIONS = "x-guidance"


class UnfitSchema(ValueError):
    """A schema that texts cannot be held to.

    Attributes:
        path: Path of the keyword in the schema, such as `.properties.a.minProperties`; empty for
            the whole schema.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def read_schema(text: str) -> dict[str, Any]:
    """Returns the schema of a text, if it is bounded and the grammar of it lets nothing else pass.

    Raises:
        UnfitSchema: If it is no schema, is too deep or too large, or would not be enforced.
    """
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnfitSchema("", f"is no JSON: {error}") from None
    except RecursionError:
        raise UnfitSchema("", f"is nested more than {MAX_DEPTH} levels deep") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise UnfitSchema("", f"expected a JSON schema, which is an object, got {text[:40]!r}")
    _check_size(schema)
    if _OPTIONS in schema:
        raise UnfitSchema(f".{_OPTIONS}", "is not supported; the server sets these options")
    for path, own in subschemas(schema):
        _check_keys(path, own)
    return schema


def subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields every object that is a schema, with its path."""
    waiting = [(path, schema)]
    while waiting:
        path, own = waiting.pop()
        if not isinstance(own, dict):
            continue
        yield path, own
        for name in _SCHEMAS:
            if name in own:
                waiting.append((f"{path}.{name}", own[name]))
        for name in _LISTS:
            if isinstance(own.get(name), list):
                waiting += [(f"{path}.{name}[{n}]", one) for n, one in enumerate(own[name])]
        for name in _NAMED:
            if isinstance(own.get(name), dict):
                waiting += [(f"{path}.{name}.{key}", one) for key, one in own[name].items()]


def find_path(schema: Any, holds: Callable[[Mapping[str, Any]], str | None]) -> str:
    """Returns the path of the first keyword that `holds` names in a schema; empty without one."""
    for path, own in subschemas(schema):
        name = holds(own)
        if name is not None:
            return f"{path}.{name}"
    return ""


def _check_size(schema: Any) -> None:
    """Raises UnfitSchema if a schema is too deep or has too many values."""
    level, depth, count = [schema], 0, 0
    while level:
        depth, count = depth + 1, count + len(level)
        if depth > MAX_DEPTH:
            raise UnfitSchema("", f"is nested more than {MAX_DEPTH} levels deep")
        if count > MAX_NODES:
            raise UnfitSchema("", f"has more than {MAX_NODES} values")
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one.values()
            elif isinstance(one, list):
                below += one
        level = below


def _check_keys(path: str, schema: Mapping[str, Any]) -> None:
    """Raises UnfitSchema if repeated keys would count as several properties."""
    least = schema.get("minProperties", 0)
    required = schema.get("required", ())
    names = len(set(map(str, required))) if isinstance(required, list) else 0
    if not isinstance(least, int | float) or least < 2 or names >= least:
        return
    if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
        raise UnfitSchema(
            f"{path}.minProperties",
            f"is {least}, and a text could fulfil it by writing one key several times; add "
            "additionalProperties: false, or name the keys in `required`",
        )
