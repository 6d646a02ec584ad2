"""Attribute columns of every type that filters read, and filters in plain Python beside them."""

import datetime
import random
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa

ID = 1782345678901234560  # a double cannot tell its neighbours apart
UTC = datetime.UTC
WIDTHS = (8, 16, 32, 64)
INTEGERS = {
    f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in WIDTHS
}
FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
TYPES = {
    **INTEGERS,
    **{name: getattr(pa, name)() for name in FLOATS},
    "flag": pa.bool_(),
    "price": pa.decimal128(9, 2),
    "exact": pa.decimal128(38, 4),
    "vast": pa.decimal256(60, 20),
    "round": pa.decimal128(20, -3),
    "day": pa.date32(),
    "day64": pa.date64(),
    "moment_s": pa.timestamp("s"),
    "moment_ms": pa.timestamp("ms", "UTC"),
    "moment_us": pa.timestamp("us", "Europe/Berlin"),
    "moment_ns": pa.timestamp("ns", "UTC"),
    "clock": pa.time32("s"),
    "clock_ns": pa.time64("ns"),
    "word": pa.string(),
    "kind": pa.dictionary(pa.int32(), pa.string()),
    "words": pa.list_(pa.string()),
}
CONTEXT = Context(prec=200, Emax=MAX_EMAX, Emin=MIN_EMIN)
DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


def draw_value(random: random.Random, kind: pa.DataType):
    """Draws a value as JSON carries it, or None. Repeats are frequent."""
    if random.random() < 0.15:
        return None
    types = pa.types
    if types.is_integer(kind):
        bits, signed = kind.bit_width, types.is_signed_integer(kind)
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        value = random.choice([low, high, 0, 1, 2, 5, 2**53 + 1, ID + random.randrange(4), -3])
        return min(max(value, low), high)
    if types.is_floating(kind):
        plain = random.choice([0.1, 2.5, -0.0, 1 / 3, 5.0, 65504.0, 1e-7, random.uniform(-9, 9)])
        return float(kind.to_pandas_dtype()(plain))
    if types.is_boolean(kind):
        return random.random() < 0.5
    if types.is_decimal(kind):
        most = min(kind.precision, random.choice([1, 3, kind.precision]))
        unscaled = random.choice([0, 1, 10, 250, 10**most - 1, random.randrange(10**most)])
        return Decimal(random.choice([1, -1]) * (unscaled % 10**kind.precision)).scaleb(
            -kind.scale, CONTEXT
        )
    if types.is_date(kind):
        return f"2026-{random.randrange(1, 4):02}-1{random.randrange(3)}"
    if types.is_timestamp(kind):
        places = DIGITS[kind.unit]
        fraction = random.choice(["", ".5", ".000001", ".123456789"])[: places + 1 if places else 0]
        year, day, second = random.choice([1969, 2026]), random.randrange(3), random.randrange(3)
        return f"{year}-02-1{day}T23:59:5{second}{fraction.rstrip('0').rstrip('.')}Z"
    if types.is_time(kind):
        fraction = random.choice(["", ".000000001"]) if kind == pa.time64("ns") else ""
        return f"0{random.randrange(3)}:00:0{random.randrange(3)}{fraction}"
    if types.is_list(kind):
        return random.sample(["a", "b", "c"], random.randrange(4))
    return random.choice(["a", "b", "C1", "ä"])


def draw_literal(random: random.Random, kind: pa.DataType, values: list):
    """Draws the literal of a filter: a value of the column, a neighbour, or a far one."""
    types = pa.types
    own = [value for value in values if value is not None]
    if types.is_list(kind):
        return random.choice(["a", "b", "z"])
    value = random.choice(own) if own else draw_value(random, kind)
    while value is None:
        value = draw_value(random, kind)
    if isinstance(value, bool):
        return value
    if types.is_integer(kind):
        far = [
            2.5,
            -0.5,
            1e300,
            -1e300,
            2**63,
            2**64,
            -(2**63) - 1,
            10**30,
            Decimal("1E+999999999"),
        ]
        near = [value, value, value + 1, value - 1, Decimal(f"{value}.0"), Decimal(f"{value}.5")]
        return random.choice(near if random.random() < 0.7 else [*far, Decimal("1E-999999999")])
    if types.is_floating(kind):
        return random.choice(
            [value, value, value + 0.25, 0.1, 1 / 3, 5, 2**70, Decimal("0.10"), 1e30]
        )
    if types.is_decimal(kind):
        tiny = Decimal(1).scaleb(-kind.scale - 1, CONTEXT)
        return random.choice(
            [
                value,
                value,
                value.normalize(CONTEXT),
                str(value),
                CONTEXT.add(value, tiny),
                2.5,
                10**90,
            ]
        )
    if types.is_timestamp(kind):
        return random.choice(
            [
                value,
                value,
                value.lower(),
                value.replace("Z", ".00000000001Z") if "." not in value else value,
            ]
        )
    return value


def _zoned(text: str) -> Fraction:
    text = text.upper().replace(" ", "T")
    body, fraction = text.removesuffix("Z"), "0"
    if "." in body:
        body, fraction = body.split(".")
    whole = datetime.datetime.fromisoformat(body).replace(tzinfo=UTC)
    return int((whole - datetime.datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()) + Fraction(
        f"0.{fraction}"
    )


def _order(kind: pa.DataType, value):
    """Returns a number or a text that Python compares as the column's type is ordered."""
    types = pa.types
    if types.is_floating(kind):
        with np.errstate(over="ignore"):
            rounded = kind.to_pandas_dtype()(float(value))
        return float(rounded)
    if types.is_timestamp(kind):
        return _zoned(value)
    if types.is_decimal(kind):
        return Fraction(str(value))
    if types.is_integer(kind) and isinstance(value, Decimal) and abs(value.adjusted()) > 1000:
        return float("inf") if value.adjusted() > 0 else Fraction(1, 10**9)
    if types.is_integer(kind):
        return Fraction(value)
    return value


def fulfils(tree, row: dict, schema: dict) -> bool:
    """Whether an item fulfils a filter, by a loop in plain Python.

    Args:
        tree: The filter.
        row: Values of the item by column, as JSON carries them.
        schema: Arrow types by column.
    """
    ((operator, operand),) = tree.items()
    if operator == "not":
        return not fulfils(operand, row, schema)
    if operator in ("and", "or"):
        return (all if operator == "and" else any)(fulfils(part, row, schema) for part in operand)
    name, *literals = operand
    value, kind = row[name], schema[name]
    if value is None:
        return False
    if pa.types.is_list(kind):
        wanted = literals if operator == "eq" else literals[0]
        return any(text in value for text in wanted)
    here = _order(kind, value)
    if operator == "range":
        low, high = (None if end is None else _order(kind, end) for end in literals)
        return (low is None or low <= here) and (high is None or here <= high)
    wanted = literals if operator == "eq" else literals[0]
    return any(_order(kind, literal) == here for literal in wanted)


def draw_filter(random: random.Random, schema: dict, rows: list[dict], depth: int = 0):
    """Draws a filter over the columns of a schema."""
    if depth < 2 and random.random() < 0.3:
        operator = random.choice(["not", "and", "or"])
        if operator == "not":
            return {"not": draw_filter(random, schema, rows, depth + 1)}
        return {operator: [draw_filter(random, schema, rows, depth + 1) for _ in range(2)]}
    name = random.choice(sorted(schema))
    kind, values = schema[name], [row[name] for row in rows]

    def literal():
        return draw_literal(random, kind, values)

    ranged = not (pa.types.is_list(kind) or kind in (pa.string(), TYPES["kind"], pa.bool_()))
    operator = random.choice(["eq", "in", "range"] if ranged else ["eq", "in"])
    if operator == "eq":
        return {"eq": [name, literal()]}
    if operator == "in":
        return {"in": [name, [literal() for _ in range(random.randrange(1, 12))]]}
    low, high = sorted((literal(), literal()), key=lambda end: _order(kind, end))
    return {"range": [name, random.choice([None, low]), random.choice([None, high])]}


def draw_inverted(random: random.Random, name: str, values: list) -> list | None:
    """Draws a range of a column whose low end is above its high end; None if none was drawn."""
    kind = TYPES[name]
    one, other = (draw_literal(random, kind, values) for _ in range(2))
    if _order(kind, one) == _order(kind, other):
        return None
    low, high = sorted((one, other), key=lambda end: _order(kind, end))
    return [name, high, low]


def draw_rows(random: random.Random, schema: dict, count: int) -> list[dict]:
    """Draws the items of a table."""
    return [{name: draw_value(random, kind) for name, kind in schema.items()} for _ in range(count)]


def arrow_array(values: list, kind: pa.DataType) -> pa.Array:
    """Returns values in JSON form as an Arrow array, without the code under test."""
    types = pa.types
    if types.is_date(kind):
        values = [value and datetime.date.fromisoformat(value) for value in values]
    elif types.is_timestamp(kind):
        factor = 10 ** DIGITS[kind.unit]
        values = [value and int(_zoned(value) * factor) for value in values]
    elif types.is_time(kind):
        factor = 10 ** DIGITS[kind.unit]
        values = [value and int((_zoned(f"1970-01-01T{value}Z")) * factor) for value in values]
    elif kind == pa.float16():
        values = [None if value is None else np.float16(value) for value in values]
    return pa.array(values, kind)
