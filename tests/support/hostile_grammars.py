"""Fields of requests whose constraint crashes a library of grammars, or keeps it busy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

Fields = dict[str, Any]


def _schema(schema: Any) -> Fields:
    return {"guided_json": schema if isinstance(schema, str) else json.dumps(schema)}


def _rules(random: np.random.Generator) -> Fields:
    count = int(random.integers(10_000, 15_000))
    rules = "\n".join(f'r{n}: "a" r{n + 1} | "b" r{n + 1}' for n in range(count))
    return {"guided_grammar": f'start: r0\n{rules}\nr{count}: "c"'}


def _patterns(random: np.random.Generator) -> Fields:
    first, count = int(random.integers(1000)), int(random.integers(400, 900))
    return _schema({"patternProperties": {f"^{first}a{n}_": {} for n in range(count)}})


def _doubled(random: np.random.Generator) -> Fields:
    depth, first = 24, int(random.integers(1 << 30))
    named = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
        for n in range(depth)
    }
    last = {"type": "integer", "minimum": first}
    return _schema({"$ref": "#/$defs/d0", "$defs": {**named, f"d{depth}": last}})


HOSTILE: dict[str, Callable[[np.random.Generator], Fields]] = {
    "deep rules": _rules,
    "nested repeats": lambda random: {"guided_regex": "((a*)*)*" * int(random.integers(2e4, 3e4))},
    "counted repeats": lambda random: {
        "guided_regex": rf"(\w{{1,{random.integers(150, 250)}}}\d){{100}}"
    },
    "many patterns": _patterns,
    "multiples": lambda random: _schema(
        {"type": "integer", "multipleOf": int(random.integers(20_000, 30_000)) * 2003}
    ),
    "huge enum": lambda random: _schema(
        {"enum": [f"{random.integers(1 << 30)}v{n}" for n in range(40_000)]}
    ),
    "many keys": lambda random: _schema(
        {"properties": {f"{random.integers(9)}p{n}": {"format": "date-time"} for n in range(9000)}}
    ),
    "deep nesting": lambda random: _schema("[" * int(random.integers(1e5, 2e5))),
    "doubled references": _doubled,
    "long text": lambda random: _schema({"title": "y" * int(random.integers(9e5, 1e6))}),
    "many choices": lambda random: {
        "guided_choice": [f"{random.integers(1 << 30)} {n}" for n in range(50_000)]
    },
}


def hostile(kind: str, random: np.random.Generator) -> Fields:
    """Returns the fields of a request, which differ for each draw."""
    return HOSTILE[kind](random)
