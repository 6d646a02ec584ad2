"""Validation errors of request bodies. Each names the field, its bound and the given value.

msgspec reports the place of an error and the expected value. This module adds the given value, the
nearest field name, and the meaning of a pattern.
"""

from __future__ import annotations

import datetime
import difflib
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, inspect

from recserve.bounds import (
    MAX_ID_LENGTH,
    MAX_WHOLE,
    NUMBER_OF_TIME,
    format_time,
    id_of_number,
    time_of_number,
)
from recserve.schemas.items import (
    ID,
    OR_TYPE,
    TIME,
    TOKEN_ID,
    InvalidRequest,
    MissingField,
    UnknownField,
)
from recserve.schemas.numbers import ENCODER, exact_number

T = TypeVar("T")
Step = str | int
_PLACE = re.compile(r" - at (`key` in )?`\$\.?(.*)`$")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"Object contains unknown field (.*)", re.DOTALL)
_MISTYPED = re.compile(r"Expected (?:str|datetime)(?: \| null)?, got (\w+)")
_MISSING = re.compile(r"Object missing required field (.*)")
GOT_FLOAT = "got `float`"
MAX_NUMBER = 10**100  # larger ones are not written as text
_LEAP = re.compile(r"(.{10}[Tt ]\d\d:\d\d:)60(.*)", re.ASCII | re.DOTALL)
_JSON: msgspec.json.Decoder[Any] = msgspec.json.Decoder(float_hook=exact_number)
_ENTRY = "[...]"  # msgspec's path step for some entry of a mapping; it does not name the key


def to_message(given: Any, kind: type[T]) -> T:
    """Converts plain Python values to a message type. A float such as 5.0 counts as an integer.

    Numbers may stand in the place of ids and times, see `number_texts`.

    Raises:
        InvalidRequest: If the values do not fit the type.
    """
    try:
        return msgspec.convert(given, kind, str_keys=True)
    except msgspec.ValidationError:
        given = number_texts(given, kind)
    try:
        return msgspec.convert(given, kind, str_keys=True)
    except msgspec.ValidationError as error:
        if GOT_FLOAT not in str(error):
            raise validation_error(str(error), given, kind) from None
    # JSON Schema counts 5.0 as an integer, msgspec does not.
    whole = _whole(given)
    try:
        return msgspec.convert(whole, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), whole, kind) from None


def json_text(param: str, text: str | None, max_length: int = 65_536) -> Any:
    """Returns a field that is written as JSON text, such as a column of a table, as plain values.

    Raises:
        InvalidRequest: If the text is too long or not JSON.
    """
    if text is None:
        return None
    if len(text) > max_length:
        expected = f"expected at most {max_length} characters"
        raise InvalidRequest(param, f"{expected}, got a string of length {len(text)}")
    try:
        return _JSON.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(param, f"expected JSON, got {text[:60]!r} ({error})") from None


def number_texts(given: Any, kind: Any) -> Any:
    """Returns plain values with texts for the numbers in the place of ids and times.

    A number that stands for no id stays as it is. One that stands for no time becomes its digits,
    so that the message about it is that of other texts. A leap second becomes the second before,
    since msgspec reads none.

    Args:
        given: Plain values of a message.
        kind: Type of the message. Its texts name what a number means there (`OR_TYPE`).
    """
    for path, meaning in _number_fields(kind):
        given = _map_at(given, path, _id_text if meaning == ID else _time_text)
    return given


@lru_cache(maxsize=256)
def _number_fields(kind: Any) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Returns paths to ids and times of a type, `*` for each element of a list."""
    found: list[tuple[tuple[str, ...], str]] = []

    def visit(there: inspect.Type, path: tuple[str, ...], above: tuple[Any, ...]) -> None:
        if isinstance(there, inspect.Metadata):
            if meaning := (there.extra_json_schema or {}).get(OR_TYPE):
                found.append((path, meaning))
            visit(there.type, path, above)
        elif isinstance(there, inspect.UnionType):
            for one in there.types:
                visit(one, path, above)
        elif isinstance(there, inspect.ListType):
            visit(there.item_type, (*path, "*"), above)
        elif isinstance(there, inspect.StructType) and there.cls not in above:
            for field in there.fields:
                visit(field.type, (*path, field.encode_name), (*above, there.cls))

    visit(inspect.type_info(kind), (), ())
    return tuple(found)


def _map_at(given: Any, path: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """Returns values with those at a path changed; only the containers on the path are copied."""
    if not path:
        return change(given)
    step, rest = path[0], path[1:]
    if step == "*" and isinstance(given, list | tuple):
        return [_map_at(value, rest, change) for value in given]
    if isinstance(given, dict) and step in given:
        return {**given, step: _map_at(given[step], rest, change)}
    return given


def _id_text(value: Any) -> Any:
    text = id_of_number(value)
    return value if text is None else text


def _without_leap(text: str) -> str:
    """Returns a leap second (`23:59:60` in UTC) as the second before; other texts as they are."""
    parts = _LEAP.fullmatch(text)
    if parts is None:
        return text
    before = f"{parts[1]}59{parts[2]}".upper()
    try:
        moment = datetime.datetime.fromisoformat(before)
        is_leap = moment.tzinfo is not None and moment.astimezone(datetime.UTC).strftime("%T")
    except (ValueError, OverflowError):
        return text
    return before if is_leap == "23:59:59" else text


def _time_text(value: Any) -> Any:
    time_us = time_of_number(value)
    if time_us is not None:
        return format_time(time_us)
    if isinstance(value, str):
        return _without_leap(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return value
    return f"{Decimal(str(value)):f}" if -MAX_NUMBER < value < MAX_NUMBER else value


def validation_error(text: str, given: Any, kind: Any) -> InvalidRequest:
    """Returns the client's error for a validation error of msgspec.

    Args:
        text: Message of msgspec.ValidationError.
        given: The given value; UNSET if a number is too large for any type.
        kind: Type of the expected message.
    """
    place = _PLACE.search(text)
    param = place[2] if place else ""
    reason = (text[: place.start()] if place else text).replace("`", "")
    if unknown := _UNKNOWN.fullmatch(reason):
        name = unknown[1][:64]
        return UnknownField(_path(f"{param}.{name}"), _unknown(name, _schemas(kind, param)))
    if missing := _MISSING.fullmatch(reason):
        return MissingField(_path(f"{param}.{missing[1]}"), "is required")
    reason = _describe_bound(reason, _schemas(kind, param))
    of_key = place is not None and place[1] is not None
    param, entry, inside = param.partition(_ENTRY)
    found = _value(given, _steps(param))
    if (of_key or entry) and isinstance(found, dict):
        key = _key_at_fault(text, given, kind, _steps(param))
        if of_key:
            reason, found = f"invalid key, {reason.partition(', got ')[0]}", key
        elif key is not None:
            param, found = f"{param}.{key[:64]}{inside}", _value(found[key], _steps(inside))
    if ", got " not in reason:
        reason += f", got {_summary(found)}"
    return InvalidRequest(_path(param), reason)


def _path(param: str) -> str | None:
    return param.strip(".")[:200] or None


def _whole(given: Any) -> Any:
    """Returns plain values with each float or decimal that is a whole number as an int."""
    if isinstance(given, float | Decimal):
        whole = int(given) if -MAX_WHOLE <= given <= MAX_WHOLE else None
        return whole if whole == given else given
    if isinstance(given, list):
        return [_whole(value) for value in given]
    if isinstance(given, dict):
        return {name: _whole(value) for name, value in given.items()}
    return given


def _unknown(name: str, there: Sequence[dict[str, Any]]) -> str:
    known = sorted({field for schema in there for field in schema.get("properties", {})})
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"fields are {', '.join(known)}"
    return f"unknown field; {hint}"


def _describe_bound(reason: str, there: Sequence[dict[str, Any]]) -> str:
    """Returns the bound: names of an enumeration, a pattern in words, or msgspec's own text."""
    if reason.startswith("Invalid enum value"):
        names = sorted({str(name) for schema in there for name in schema.get("enum", ())})
        return f"expected {' or '.join(names)}"
    others = [schema[OR_TYPE] for schema in there if OR_TYPE in schema]
    if others:
        mistyped = _MISTYPED.fullmatch(reason)
        too_large = reason == "Number out of range"
        number = too_large or (mistyped and mistyped[1] in ("int", "float", "decimal"))
        if others[0] == TIME and (number or reason.startswith("Invalid RFC3339")):
            return f"expected RFC 3339 with a zone, or {NUMBER_OF_TIME}"
        if too_large or (mistyped and mistyped[1] == "int"):
            return f"expected string or integer of at most {MAX_ID_LENGTH} digits"
        if mistyped:
            return f"expected string or {others[0]}"
    bound = reason.startswith(("Expected int >= ", "Expected int <= "))
    if bound and any(TOKEN_ID in schema for schema in there):
        return f"out of vocabulary; expected{reason[8:]}"
    descriptions = [schema["description"] for schema in there if "description" in schema]
    if descriptions and " matching regex " in reason:
        return f"expected {descriptions[0]}"
    return reason[:1].lower() + reason[1:]


def _key_at_fault(text: str, given: Any, kind: Any, steps: Sequence[Step]) -> str | None:
    """Finds the key of the entry that `text` is about by bisection; None if it is unknown."""
    entries = _value(given, steps)

    def same(keys: Sequence[str]) -> bool:
        part = _replace_at(given, steps, {key: entries[key] for key in keys})
        try:
            msgspec.convert(part, kind, str_keys=True)
        except msgspec.ValidationError as error:
            return str(error) == text
        return False

    keys: list[str] = list(entries)
    if not same(keys):
        return None
    while len(keys) > 1:
        half = keys[: len(keys) // 2]
        keys = half if same(half) else keys[len(half) :]
    return keys[0]


def _schemas(kind: Any, param: str) -> list[dict[str, Any]]:
    """Returns the JSON schemas of the values allowed at `param`, with references resolved."""
    schemas, components = msgspec.json.schema_components([kind])

    def open_schemas(schemas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for schema in schemas:
            if "$ref" in schema:
                schema = components[schema["$ref"].rsplit("/", 1)[1]]
            found += open_schemas(schema["anyOf"]) if "anyOf" in schema else [schema]
        return found

    there = open_schemas(schemas)
    for step in _steps(param):
        inner = [
            schema.get("items") if isinstance(step, int) else schema.get("properties", {}).get(step)
            for schema in there
        ]
        there = open_schemas([schema for schema in inner if schema])
    return there


def _steps(param: str) -> list[Step]:
    return [int(index) if index else name for name, index in _STEP.findall(param)]


def _value(given: Any, steps: Sequence[Step]) -> Any:
    """Returns the value at a path, or its nearest existing ancestor."""
    for step in steps:
        try:
            given = given[step]
        except (KeyError, IndexError, TypeError):
            break
    return given


def _replace_at(given: Any, steps: Sequence[Step], value: Any) -> Any:
    """Returns a copy with another value at a path; only the containers on the path are copied."""
    if not steps:
        return value
    copy = given.copy()
    copy[steps[0]] = _replace_at(given[steps[0]], steps[1:], value)
    return copy


def _summary(value: Any) -> str:
    if value is UNSET:
        return "a number that is too large"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    if isinstance(value, str) and len(value) > 60:
        return f"a string of length {len(value)}"
    if isinstance(value, list | dict):
        return f"{'an array' if isinstance(value, list) else 'an object'} of length {len(value)}"
    return ENCODER.encode(value).decode()[:80]
