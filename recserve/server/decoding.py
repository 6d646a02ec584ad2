"""Bytes of a body to a typed message, with errors that name the field, its bound and what came."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from recserve.messages import InvalidRequest

T = TypeVar("T")
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


class MalformedBody(ValueError):
    """The body is not JSON."""


def decode(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    """The body, typed and bounded.

    Raises MalformedBody where it is not JSON, InvalidRequest (field, bound, what came) where it
    does not fit.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), raw, decoder.type) from None
    except RecursionError:
        raise InvalidRequest(None, "the body is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the body is not valid JSON: {error}") from None


def _invalid(text: str, raw: bytes, body_type: Any) -> InvalidRequest:
    place = _PLACE.search(text)
    param = place[1] if place else ""
    reason = (text[: place.start()] if place else text).replace("`", "")
    unknown = re.fullmatch(r"Object contains unknown field (.*)", reason)
    if unknown:
        name = unknown[1][:64]
        known = _fields_at(body_type, param)
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; fields are {', '.join(known)}"
        return InvalidRequest(f"{param}.{name}" if param else name, f"unknown field{hint}")
    missing = re.fullmatch(r"Object missing required field (.*)", reason)
    if missing:
        return InvalidRequest(f"{param}.{missing[1]}" if param else missing[1], "is required")
    reason = reason[:1].lower() + reason[1:]
    if ", got " not in reason:
        reason += f", got {_summary(_value_at(raw, param))}"
    return InvalidRequest(param[:200] or None, reason)


def _fields_at(body_type: Any, param: str) -> list[str]:
    """Sorted field names of the message at `param`, a place inside the body."""
    schemas, components = msgspec.json.schema_components([body_type])

    def opened(schemas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """The schemas themselves, without references and alternatives."""
        found = []
        for schema in schemas:
            if "$ref" in schema:
                schema = components[schema["$ref"].rsplit("/", 1)[1]]
            found += opened(schema["anyOf"]) if "anyOf" in schema else [schema]
        return found

    there = opened(schemas)
    for name, index in _STEP.findall(param):
        inner = [s.get("items") if index else s.get("properties", {}).get(name) for s in there]
        there = opened(schema for schema in inner if schema)
    return sorted({name for schema in there for name in schema.get("properties", {})})


def _value_at(raw: bytes, param: str) -> Any:
    """What the client sent at `param`, or as near to it as can be walked."""
    try:
        value: Any = msgspec.json.decode(raw)
        for name, index in _STEP.findall(param):
            value = value[int(index)] if index else value[name]
    except (KeyError, IndexError, TypeError):
        pass
    except (msgspec.DecodeError, RecursionError):
        return UNSET
    return value


def _summary(value: Any) -> str:
    if value is UNSET:
        return "something that no number can hold"
    if isinstance(value, str) and len(value) > 60:
        return f"a string of length {len(value)}"
    if isinstance(value, list | dict):
        return f"{'an array' if isinstance(value, list) else 'an object'} of length {len(value)}"
    return msgspec.json.encode(value).decode()[:80]
