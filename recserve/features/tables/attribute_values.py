"""Values of attribute columns: exact numbers, and the form in which records store them.

| column | value of a record, as in JSON |
|---|---|
| integers, floats, booleans, text, lists of text | the same |
| decimals | Decimal with the places of the column; the journal stores its text |
| dates, timestamps and times | RFC 3339 text, timestamps in UTC |
| bytes | bytes; base64 in JSON and in the journal |
| durations | timedelta; ISO 8601 text such as PT5S in JSON and in the journal |
| nested | lists, dicts and pairs of Python's own values; times and decimals in them are texts |
"""

from __future__ import annotations

import datetime
import decimal
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from recserve.features.tables.rfc3339 import (
    format_clock,
    format_date,
    format_timestamp,
    parse_clock,
    parse_date,
    parse_timestamp,
)

# Exact for every operation of this file: none of them divides.
_EXACT = decimal.Context(
    prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[]
)
BEYOND = 10**100  # larger than every value of a column: a decimal256 has 76 digits
DAY_MS = 86_400_000
DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_DECIMAL = re.compile(r"-?\d{1,80}(\.\d{1,80})?([eE][+-]?\d{1,3})?", re.ASCII)

Bounds = tuple[int, int]


def whole_bounds(value: float | Decimal, scale: int = 0) -> Bounds:
    """Returns the nearest whole numbers below and above value * 10**scale.

    Both are exact. They are equal if and only if the product is a whole number.

    Args:
        value: Number other than NaN. Beyond 10**100, both bounds are 10**100 with its sign.
        scale: Power of ten.
    """
    if isinstance(value, int):
        value = min(max(value, -BEYOND), BEYOND)
    value = Decimal(value)
    if not value:
        return 0, 0
    size = value.adjusted() + scale if value.is_finite() else math.inf
    if size >= 100:
        beyond = BEYOND if value > 0 else -BEYOND
        return beyond, beyond
    if size < -1:
        return (0, 1) if value > 0 else (-1, 0)
    shifted = value.scaleb(scale, _EXACT)
    below = shifted.to_integral_value(decimal.ROUND_FLOOR, _EXACT)
    above = shifted.to_integral_value(decimal.ROUND_CEILING, _EXACT)
    return int(below), int(above)


def number_bounds(value: Any) -> Bounds:
    """Returns the whole numbers around a number. Raises ValueError for another type."""
    if not is_number(value):
        raise ValueError("a number")
    return whole_bounds(value)


def decimal_bounds(value: Any, scale: int) -> Bounds:
    """Returns the unscaled values of a decimal column around a number or the text of a number.

    A float stands for its shortest text. Raises ValueError for another type.
    """
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        value = Decimal(value)
    if not is_number(value):
        raise ValueError("a number")
    return whole_bounds(Decimal(repr(value)) if isinstance(value, float) else value, scale)


def is_number(value: Any) -> bool:
    """Whether a value is a number other than NaN. A boolean is none."""
    number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    return number and bool(value == value)  # NaN differs from itself


def round_to(value: float | Decimal, kind: np.dtype) -> Any:
    """Returns a number in a floating-point type; it is infinite beyond the type's range."""
    try:
        rounded = float(value)
    except OverflowError:  # an integer
        rounded = math.inf if value > 0 else -math.inf
    with np.errstate(over="ignore"):
        return kind.type(rounded)


def plain_type(kind: Any) -> Any:
    """Returns the type of the values of a column, which may be dictionary-encoded."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_temporal(kind: Any) -> bool:
    """Whether a column holds dates, timestamps or times of day."""
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_time(kind))


def temporal_bounds(kind: Any) -> Callable[[Any], Bounds]:
    """Returns a function that gives the ticks of a column below and above a text.

    A tick is the unit in which the column stores its values. The function raises ValueError, with
    the expected form, for another value.
    """
    if pa.types.is_date(kind):
        factor = 1 if pa.types.is_date32(kind) else DAY_MS
        parse: Callable[[str], Any] = parse_date
    elif pa.types.is_timestamp(kind):
        factor = 10 ** DIGITS[kind.unit]
        parse = lambda text: parse_timestamp(text, utc=kind.tz is None)  # noqa: E731
    else:
        factor = 10 ** DIGITS[kind.unit]
        parse = parse_clock

    def bounds(value: Any) -> Bounds:
        if isinstance(value, datetime.date | datetime.time):  # Python's own values
            value = value.isoformat()
        if not isinstance(value, str):
            raise ValueError(f"an RFC 3339 text ({kind})")
        try:
            return whole_bounds(parse(value) * factor)
        except ValueError:
            raise ValueError(f"an RFC 3339 text ({kind})") from None

    return bounds


def record_value(scalar: pa.Scalar) -> Any:
    """Returns a value of an Arrow column in the form of records."""
    kind = scalar.type
    if not scalar.is_valid or not is_temporal(kind):
        return scalar.as_py()
    ticks = scalar.value
    try:
        if pa.types.is_date(kind):
            return format_date(ticks if pa.types.is_date32(kind) else ticks // DAY_MS)
        if pa.types.is_timestamp(kind):
            return format_timestamp(ticks, DIGITS[kind.unit])
        return format_clock(ticks, DIGITS[kind.unit])
    except (ValueError, OverflowError):  # the year has no four digits
        return scalar.cast(pa.string()).as_py()


def take_values(column: pa.ChunkedArray, rows: np.ndarray) -> list[Any]:
    """Returns the values [n] of a column at rows [n], in the form of records.

    It takes from the chunks that hold the rows. `ChunkedArray.take` would copy all chunks.
    """
    starts = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])
    numbers = np.searchsorted(starts, rows, "right") - 1
    values: list[Any] = [None] * rows.size
    for number in np.unique(numbers).tolist():
        places = np.flatnonzero(numbers == number)
        part = column.chunk(number).take(pa.array(rows[places] - starts[number]))
        if pa.types.is_dictionary(part.type):
            part = part.dictionary_decode()
        plain = [record_value(v) for v in part] if is_temporal(part.type) else part.to_pylist()
        for place, value in zip(places.tolist(), plain, strict=True):
            values[place] = value
    return values


def parse_value(value: Any, kind: Any) -> Any:
    """Returns a JSON value in the form of records, or None for null.

    A column of floats rounds it to its type. All other columns keep it exactly.

    Args:
        value: The JSON value.
        kind: Arrow type of the column.

    Raises:
        ValueError, TypeError, OverflowError, pyarrow.ArrowException: If the column cannot hold the
            value.
    """
    kind = plain_type(kind)
    if value is None:
        return None
    if pa.types.is_floating(kind):
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise TypeError
        rounded = float(round_to(value, np.dtype(kind.to_pandas_dtype())))
        if math.isinf(rounded) and not (isinstance(value, float) and math.isinf(value)):
            raise OverflowError
        return rounded
    if pa.types.is_integer(kind):
        return pa.scalar(_exact(number_bounds(value)), kind).as_py()
    if pa.types.is_decimal(kind):
        unscaled = _exact(decimal_bounds(value, kind.scale))
        if abs(unscaled) >= 10**kind.precision:
            raise OverflowError
        return Decimal(unscaled).scaleb(-kind.scale, _EXACT)
    if is_temporal(kind):
        ticks = _exact(temporal_bounds(kind)(value))
        return record_value(pa.array([ticks], kind)[0])
    converted = pa.scalar(_read_json(value, kind), kind).as_py()
    # Arrow converts numbers to booleans, and splits strings into lists.
    if isinstance(value, bool | list) != isinstance(converted, bool | list):
        raise TypeError
    return converted


def has_json_form(kind: Any) -> bool:
    """Whether JSON writes the values of a column in another form than that of records."""
    kind = plain_type(kind)
    return bool(
        pa.types.is_decimal(kind)
        or pa.types.is_nested(kind)
        or pa.types.is_duration(kind)
        or _is_bytes(kind)
    )


def _is_bytes(kind: Any) -> bool:
    own = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return bool(own or pa.types.is_fixed_size_binary(kind) or pa.types.is_binary_view(kind))


def _read_json(value: Any, kind: Any) -> Any:
    """Returns a JSON value with Python's own bytes, durations, times and decimals in it.

    Raises:
        ValueError: If a text is not of the form that JSON has for its type.
    """
    kind = plain_type(kind)
    if pa.types.is_decimal(kind):
        return parse_value(value, kind)
    if isinstance(value, str):
        types = {
            bytes: _is_bytes,
            datetime.timedelta: pa.types.is_duration,
            datetime.date: pa.types.is_date,
            datetime.datetime: pa.types.is_timestamp,
            datetime.time: pa.types.is_time,
        }
        own = next((own for own, fits in types.items() if fits(kind)), None)
        return value if own is None else msgspec.convert(value, own)
    if isinstance(value, list | tuple) and pa.types.is_map(kind):
        return [(_read_json(k, kind.key_type), _read_json(v, kind.item_type)) for k, v in value]
    if isinstance(value, list) and pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        return [_read_json(one, kind.value_type) for one in value]
    if isinstance(value, dict) and pa.types.is_struct(kind):
        known = {field.name: field.type for field in kind}
        if unknown := value.keys() - known.keys():
            raise ValueError(f"unknown {min(unknown)}")
        return {name: _read_json(one, known[name]) for name, one in value.items()}
    return value


def record_column(values: Sequence[Any], kind: Any) -> pa.Array:
    """Returns values of records, or None, as an Arrow array without dictionary."""
    kind = plain_type(kind)
    if is_temporal(kind):
        bounds = temporal_bounds(kind)
        values = [None if value is None else bounds(value)[0] for value in values]
    return pa.array(values, kind)


def _exact(bounds: Bounds) -> int:
    """Returns the number that equals both bounds. Raises ValueError if they differ."""
    if bounds[0] != bounds[1]:
        raise ValueError
    return bounds[0]
