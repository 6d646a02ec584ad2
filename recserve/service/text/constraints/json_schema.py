"""JSON schemas of constraints: their bounds, and what the grammar of a schema would let pass.

llguidance refuses most of what it cannot enforce. The rest is here:

- A key that is written twice counts as two properties. Schemas where that matters are refused.
- Characters that only `\\u0000` could write are left out of constants. Those are refused.
- Dates such as 2021-02-29, leap seconds and host names of other alphabets pass. Their formats are
  replaced by patterns, which refuse all leap seconds and all names with `--` in third place.
- White space in patterns is that of Rust. It is replaced by that of JavaScript.
- Numbers may have any length and exponent, so that `1e400` passes, and a number whose double is
  equal to an exclusive bound. They get bounds, with which they have no exponent.
- A schema that refers to itself without a value in between means nothing. It is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 96  # of objects and lists in a schema
MAX_NODES = 100_000
MAX_NUMBER = 10**18  # of the numbers that texts write, which have no exponent
MAX_EXACT = 2**53  # up to which a double has each integer
MIN_POSITIVE = 1e-30  # least number above an exclusive bound of 0
# A key must have one spelling: `\u0061` would be a second one of `a`.
ESCAPES = 'nrbtf\\"'

_SCHEMAS = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("additionalItems", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# A value fulfils a schema and these of its parts.
_SAME_VALUE = ("allOf", "anyOf", "oneOf")
_ANY = {"$ref": "#/$defs/recserve-any"}
_TYPES = ["null", "boolean", "number", "string", "array", "object"]
_NOTES = frozenset(
    {
        *("title", "description", "default", "examples", "example", "$comment", "deprecated"),
        *("readOnly", "writeOnly", "$schema", "$id", "id", "$defs", "definitions", "$anchor"),
    }
)
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (.*)")
_CHOSEN = ("$ref", "const", "enum", *_SAME_VALUE)
_OPTIONS = "x-guidance"
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
_SPACES = (
    r"\t\n\x{b}\f\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
)
_CLASSES = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}
_DAYS = (
    r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    r"|02-(0[1-9]|1\d|2[0-8]))"
)
_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
_DATE = rf"(\d{{4}}-{_DAYS}|{_LEAP})"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_L, _H = "[A-Za-z0-9]", "[A-Za-z0-9-]"  # a letter or digit, and the same with hyphens
_LABEL = f"{_L}({_L}|{_H}{_L}|{_H}{_H}{_L}|{_H}({_L}{_H}|-{_L}){_H}{{0,58}}{_L})?"
# Formats for which llguidance lets more pass than the format allows.
_FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}$"},
    "hostname": {"pattern": rf"^{_LABEL}(\.{_LABEL})*$", "maxLength": 253},
}


class UnfitSchema(ValueError):
    """A schema that texts cannot be held to.

    Attributes:
        path: Path of the keyword in the schema, such as `.properties.a.minProperties`; empty for
            the whole schema.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def json_options(blanks: int = 0) -> Any:
    """Returns how JSON of a schema is written, for llguidance.

    Args:
        blanks: Most blanks in a row between tokens. 0 writes compact JSON.
    """
    options: dict[str, Any] = {
        "whitespace_flexible": False,
        "json_allowed_escapes": ESCAPES,
        "coerce_one_of": False,
        "lenient": False,
    }
    if blanks:
        options["whitespace_pattern"] = rf"[\x20\x0A\x0D\x09]{{1,{blanks}}}"
    return options


def read_schema(text: str) -> dict[str, Any]:
    """Returns the schema of a text, if it is bounded and the grammar of it lets nothing else pass.

    Raises:
        UnfitSchema: If it is no schema, is too deep or too large, or would not be enforced.
    """
    try:
        schema = json.loads(text, parse_int=_integer)
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
    _check_cycles(schema)
    every = list(subschemas(schema))
    for path, own in every:
        _check_keys(path, own)
        _check_constants(path, own)
        _replace_patterns(own)
        _replace_format(own)
        _bound_numbers(path, own)
    # What several schemas say of one value is merged, for which the others must stay as they are.
    if not any(
        "allOf" in own or ("$ref" in own and set(own) - _NOTES != {"$ref"}) for _, own in every
    ):
        for _, own in every:
            _bound_others(own)
        schema.setdefault("$defs", {})["recserve-any"] = {
            **{"type": _TYPES, "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER},
            **{"items": _ANY, "additionalProperties": _ANY},
        }
    return schema


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every object that is a schema, with its path."""
    waiting, known = [("", schema)], set[int]()
    while waiting:
        path, own = waiting.pop()
        if not isinstance(own, dict) or id(own) in known:
            continue
        known.add(id(own))
        yield path, own
        if isinstance(reference := own.get("$ref"), str):
            waiting.append(_target(schema, reference))
        for name in _SCHEMAS:
            if name in own:
                waiting.append((f"{path}.{name}", own[name]))
        for name in _LISTS:
            if isinstance(own.get(name), list):
                waiting += [(f"{path}.{name}[{n}]", one) for n, one in enumerate(own[name])]
        for name in _NAMED:
            if isinstance(own.get(name), dict):
                waiting += [(f"{path}.{name}.{key}", one) for key, one in own[name].items()]


def _target(schema: Any, reference: str) -> tuple[str, Any]:
    """Returns path and value of what a reference inside the schema points to; None if nothing."""
    if isinstance(own := schema.get("$id"), str) and own:
        reference = reference.removeprefix(own.rstrip("#"))
    if reference in ("", "#"):
        return "", schema
    if not reference.startswith("#/"):
        return "", None
    names = [name.replace("~1", "/").replace("~0", "~") for name in reference[2:].split("/")]
    found = schema
    for name in names:
        if isinstance(found, dict):
            found = found.get(unquote(name))
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return "", None
    return "".join(f".{name}" for name in names), found


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
            elif isinstance(one, float) and not math.isfinite(one):
                raise UnfitSchema(_path_of(schema), "is a number that no double has")
        level = below


def _integer(text: str) -> float:
    """Returns an integer; an infinity if no double is near it."""
    return int(text) if len(text) < 308 else float(text)


def _path_of(schema: Any, path: str = "") -> str:
    """Returns the path of the first number in a schema that is not finite; empty without one."""
    if isinstance(schema, float) and not math.isfinite(schema):
        return path
    parts: list[tuple[str, Any]] = []
    if isinstance(schema, dict):
        parts = [(f"{path}.{name}", one) for name, one in schema.items()]
    elif isinstance(schema, list):
        parts = [(f"{path}[{place}]", one) for place, one in enumerate(schema)]
    return next(filter(None, (_path_of(one, below) for below, one in parts)), "")


def _check_cycles(schema: Any) -> None:
    """Raises UnfitSchema if a value would have to fulfil a schema before it fulfils that schema."""
    done = set[int]()
    for first, own in subschemas(schema):
        trail: list[tuple[str, Any, Iterator[tuple[str, Any]]]] = []
        open_ids = set[int]()
        step: tuple[str, Any] | None = (first, own)
        while step is not None or trail:
            if step is not None:
                path, one = step
                if id(one) in open_ids:
                    raise UnfitSchema(
                        f"{trail[-1][0]}{_link(trail[-1][1])}",
                        "is a cycle of schemas without a value in between",
                    )
                if isinstance(one, dict) and id(one) not in done:
                    open_ids.add(id(one))
                    trail.append((path, one, _same_value(schema, path, one)))
            path, one, below = trail[-1] if trail else ("", None, iter(()))
            step = next(below, None)
            if step is None and trail:
                trail.pop()
                open_ids.discard(id(one))
                done.add(id(one))


def _same_value(schema: Any, path: str, own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the schemas that the value of a schema fulfils too, or one of which it fulfils."""
    if isinstance(reference := own.get("$ref"), str):
        yield _target(schema, reference)
    for name in _SAME_VALUE:
        if isinstance(own.get(name), list):
            yield from ((f"{path}.{name}[{n}]", one) for n, one in enumerate(own[name]))


def _link(own: Mapping[str, Any]) -> str:
    return next((f".{name}" for name in ("$ref", *_SAME_VALUE) if name in own), "")


def _bound_numbers(path: str, schema: dict[str, Any]) -> None:
    """Gives the numbers of a schema bounds, and makes those that it has exact."""
    given = [
        (name, schema[name])
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        if isinstance(schema.get(name), int | float) and not isinstance(schema[name], bool)
    ]
    for name, bound in given:
        low = name in ("minimum", "exclusiveMinimum")
        if (bound > MAX_NUMBER) if low else (bound < -MAX_NUMBER):
            raise UnfitSchema(
                f"{path}.{name}", f"expected -{MAX_NUMBER} to {MAX_NUMBER}, got {bound}"
            )
        if abs(bound) > MAX_NUMBER:
            del schema[name]  # the other bounds say more
        elif abs(bound) > MAX_EXACT:
            schema[name] = _round(bound, up=low)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "multipleOf" in schema or not (
        {"number", "integer"} & {k for k in kinds if isinstance(k, str)}
    ):
        return
    if "number" in kinds and not schema.keys() & {"const", "enum"}:
        for name, far, least in (
            ("exclusiveMinimum", math.inf, "minimum"),
            ("exclusiveMaximum", -math.inf, "maximum"),
        ):
            bound = schema.get(name)
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                continue
            del schema[name]
            near = math.nextafter(bound, far) if bound else math.copysign(MIN_POSITIVE, far)
            other = schema.get(least, near)
            if isinstance(other, int | float):
                schema[least] = max(near, other) if far > 0 else min(near, other)
    if not schema.keys() & {"const", "enum"}:
        if "exclusiveMinimum" not in schema:
            schema.setdefault("minimum", -MAX_NUMBER)
        if "exclusiveMaximum" not in schema:
            schema.setdefault("maximum", MAX_NUMBER)


def _round(bound: float, up: bool) -> int:
    """Returns an integer of 15 digits and zeros next to a large bound, inside of it."""
    whole: int = math.ceil(bound) if up else math.floor(bound)
    unit: int = 10 ** (len(str(abs(whole))) - 15)
    return -(-whole // unit) * unit if up else whole // unit * unit


def _bound_others(schema: dict[str, Any]) -> None:
    """Writes out that a schema allows any value somewhere, so that numbers there have bounds."""
    for name in ("items", "additionalProperties", "additionalItems"):
        if name in schema and (schema[name] is True or schema[name] == {}):
            schema[name] = dict(_ANY)
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            schema[name] = [dict(_ANY) if one is True else one for one in schema[name]]
    for name in _NAMED:
        if isinstance(schema.get(name), dict):
            schema[name] = {
                key: dict(_ANY) if one is True else one for key, one in schema[name].items()
            }
    if schema.keys() & set(_CHOSEN):
        return
    if not set(schema) - _NOTES:
        schema.update(_ANY)
        return
    if "type" not in schema:
        schema["type"] = list(_TYPES)
        if "multipleOf" not in schema:
            schema.setdefault("minimum", -MAX_NUMBER)
            schema.setdefault("maximum", MAX_NUMBER)
    kinds = schema["type"]
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds):
        schema.setdefault("additionalProperties", dict(_ANY))
    if (kinds == "array" or (isinstance(kinds, list) and "array" in kinds)) and not (
        isinstance(schema.get("items"), list)
    ):
        schema.setdefault("items", dict(_ANY))


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


def _check_constants(path: str, schema: Mapping[str, Any]) -> None:
    """Raises UnfitSchema if a constant or a key has a character that a text cannot write."""
    properties, required = schema.get("properties"), schema.get("required")
    given = {
        "const": schema.get("const"),
        "enum": schema.get("enum"),
        "properties": list(properties) if isinstance(properties, dict) else None,
        "required": required,
    }
    for name, value in given.items():
        if name in ("const", "enum") and (number := _inexact(value)) is not None:
            raise UnfitSchema(
                f"{path}.{name}",
                f"has the number {number}, but texts have integers up to {MAX_EXACT} only",
            )
        if value is not None and any(map(_UNWRITABLE.search, _strings(value))):
            raise UnfitSchema(
                f"{path}.{name}", "has a control character that needs an escape such as \\u0000"
            )


def _inexact(value: Any) -> int | None:
    """Returns an integer in a constant that texts would have rounded; None without one."""
    if isinstance(value, int):
        return value if abs(value) > MAX_EXACT else None
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return None
    return next((n for n in map(_inexact, parts) if n is not None), None)


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings of a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)
    elif isinstance(value, dict):
        yield from value
        yield from _strings(list(value.values()))


def _replace_patterns(schema: dict[str, Any]) -> None:
    """Writes white space in patterns as the characters that JavaScript means."""
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _as_written(pattern)
    if isinstance(named := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {_as_written(name): own for name, own in named.items()}


def _as_written(pattern: str) -> str:
    return re.sub(r"\\.", lambda escape: _CLASSES.get(escape[0], escape[0]), pattern, flags=re.S)


def _replace_format(schema: dict[str, Any]) -> None:
    """Replaces a format by what the grammar enforces in full."""
    replaced = _FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if replaced is None:
        return
    del schema["format"]
    if replaced.keys() & schema.keys() or "allOf" in schema:
        schema["allOf"] = [*schema.get("allOf", []), dict(replaced)]
    else:
        schema.update(replaced)


def describe(schema: Mapping[str, Any], error: str) -> tuple[str, str]:
    """Returns what llguidance says against a schema: the path where it can be found, the reason."""
    path, reason = "", one_line(error)
    if found := _UNKNOWN_KEYS.search(error):
        names = json.loads(f"[{found[1]}]")
        path = find_path(schema, lambda own: next((n for n in names if n in own), None))
        reason = f"is not supported in constraints: {', '.join(names)}"
    elif found := _UNKNOWN_FORMAT.search(error):
        wanted = found[1].strip()
        path = find_path(schema, lambda own: "format" if own.get("format") == wanted else None)
        reason = f"{wanted!r} is a format that constraints do not support"
    return path, reason


def one_line(error: str) -> str:
    """Returns the parts of an error of llguidance in one short line."""
    return " ".join(error.partition("\n<")[0].split())[:300]
