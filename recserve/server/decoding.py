"""Bytes of a body to a typed message, with errors that name the field, its bound and what came."""

from __future__ import annotations

import difflib
import re
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
        known = sorted(_field_names(body_type))
        near = [n for n in difflib.get_close_matches(name, known, 2, 0.5) if n != name]
        hint = f"; did you mean {near[0]}?" if near else f"; fields are {', '.join(known)}"
        return InvalidRequest(f"{param}.{name}" if param else name, f"unknown field{hint}")
    missing = re.fullmatch(r"Object missing required field (.*)", reason)
    if missing:
        return InvalidRequest(f"{param}.{missing[1]}" if param else missing[1], "is required")
    reason = reason[:1].lower() + reason[1:]
    if ", got " not in reason:
        reason += f", got {_summary(_value_at(raw, param))}"
    return InvalidRequest(param[:200] or None, reason)


def _field_names(body_type: Any) -> set[str]:
    """Field names of a message and of the messages inside it."""
    names: set[str] = set()
    for part in msgspec.json.schema_components([body_type])[1].values():
        names.update(part.get("properties", {}))
    return names


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
