"""JSON schemas of constraints: their bounds, and what the grammar of a schema would let pass.

llguidance refuses most of what it cannot enforce. The rest is here:

- A key that is written twice counts as two properties. Schemas where that matters are refused.
- Characters that only `\\u0000` could write are left out of constants. Those are refused.
- Dates such as 2021-02-29, leap seconds and host names of other alphabets pass. Their formats are
  replaced by patterns, which refuse all leap seconds and all names with `--` in third place.
- White space in patterns is that of Rust. It is replaced by that of JavaScript.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 96  # of objects and lists in a schema
MAX_NODES = 100_000
# A key must have one spelling: `\u0061` would be a second one of `a`.
ESCAPES = 'nrbtf\\"'

_SCHEMAS = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("additionalItems", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
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
    for path, own in list(subschemas(schema)):
        _check_keys(path, own)
        _check_constants(path, own)
        _replace_patterns(own)
        _replace_format(own)
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
        if value is not None and any(map(_UNWRITABLE.search, _strings(value))):
            raise UnfitSchema(
                f"{path}.{name}", "has a control character that needs an escape such as \\u0000"
            )


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
