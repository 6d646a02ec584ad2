"""Converts the columns of an input file where that is unambiguous, and says what it did.

A conversion returns the values and a note, which is empty if nothing was converted. It raises
SchemaError with a reason that follows the words "column NAME". All rows are converted alike.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recserve.bounds import (
    END_S,
    FIRST_S,
    MAX_POSITION,
    MAX_TIME_US,
    MAX_WHOLE,
    MIN_TIME_US,
    UNITS_PER_S,
)
from recserve.features.tables.column_names import list_names
from recserve.features.tables.parquet import RowsError, SchemaError, is_text, type_error
from recserve.features.tables.rfc3339 import parse_timestamp

OUT_OF_RANGE = -1
NULL_TIME = np.iinfo(np.int64).min
ARROW_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
ISO = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)"
    r"([Tt ](?P<time>\d\d:\d\d(:\d\d([.,]\d{1,9})?)?)\s?(?P<zone>[Zz]|[+-]\d\d:?\d\d)?)?"
)
ZONED, NAIVE, DATES = "times with a zone", "times without a zone", "dates"
ISO_NOTES = {
    ZONED: "text read as RFC 3339",
    NAIVE: "text without a time zone read as UTC",
    DATES: "dates read as midnight UTC",
}
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Times:
    """The times or positions of n rows.

    Attributes:
        values: [n] int64 microseconds since 1970, or positions; OUT_OF_RANGE where there is none.
        null: [n] bool, True where the file has no value.
        given: The column of the file, for messages.
    """

    values: np.ndarray
    null: np.ndarray
    given: pa.ChunkedArray


def convert_text(values: pa.ChunkedArray) -> tuple[pa.Array, str]:
    """Returns a column as large_string: text, also dictionary-encoded, or bytes in UTF-8."""
    kind = values.type
    if is_text(kind) or pa.types.is_null(kind):
        return _cast(values, pa.large_string()), ""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        try:
            return _cast(values, pa.large_string()), "bytes read as UTF-8"
        except pa.ArrowException:
            raise SchemaError("is binary and not UTF-8; expected string") from None
    raise type_error(values, "string")


def convert_ids(values: pa.ChunkedArray) -> tuple[pa.Array, str]:
    """Returns ids as large_string. Whole numbers become their digits."""
    values = _decode(values)
    kind = values.type
    if pa.types.is_integer(kind):
        return _cast(values, pa.large_string()), "integers read as their digits"
    if pa.types.is_floating(kind):
        texts = _whole_floats(values, "string or integer")
        return texts, f"whole numbers of type {kind} read as their digits"
    if pa.types.is_decimal(kind):
        digits = [None if v is None else _digits(v) for v in values.to_pylist()]
        return pa.array(digits, pa.large_string()), f"{kind} read as digits"
    try:
        return convert_text(values)
    except SchemaError as error:
        reason = str(error).replace("expected string", "expected string or integer")
        raise SchemaError(reason) from None


def id_column(table: pa.Table, path: Path, name: str) -> pa.Array:
    """Returns one column of ids as a large_string array. Raises SchemaError."""
    if name not in table.column_names:
        listed = list_names(table.column_names)
        raise SchemaError(
            f"{path}: column {name} (string or integer) is missing; the file has {listed}"
        )
    try:
        return convert_ids(table.column(name))[0]
    except SchemaError as error:
        raise SchemaError(f"{path}: column {name} {error}") from None


def convert_split(separator: str) -> Callable[[pa.ChunkedArray], tuple[pa.Array, str]]:
    """Returns a conversion of text into a list of texts, divided at a separator."""

    def convert(values: pa.ChunkedArray) -> tuple[pa.Array, str]:
        texts, _ = convert_text(values)
        parts = [
            None if text is None else [p for p in map(str.strip, text.split(separator)) if p]
            for text in texts.to_pylist()
        ]
        return pa.array(parts, pa.list_(pa.string())), f"text divided at {separator!r}"

    return convert


def convert_values(values: pa.ChunkedArray) -> tuple[np.ndarray, str]:
    """Returns [n] float64 values; a missing value is 1."""
    values, note = _numbers_of_text(_decode(values))
    kind = values.type
    if pa.types.is_decimal(kind):
        values, note = values.cast(pa.float64()), f"{kind} read as numbers"
    elif not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise type_error(values, "float")
    filled = pc.fill_null(pc.cast(values, pa.float64(), safe=False), 1.0)
    return np.asarray(filled.to_numpy(), dtype=np.float64), note


def has_values(values: pa.ChunkedArray) -> tuple[np.ndarray, str]:
    """Returns [n] bool: whether `convert_values` finds a value."""
    return np.asarray(pc.is_valid(_numbers_of_text(_decode(values))[0])), ""


def convert_positions(values: pa.ChunkedArray) -> tuple[Times, str]:
    """Returns positions as int64."""
    given = values
    values, note = _numbers_of_text(_decode(values))
    if pa.types.is_floating(values.type):
        kind = values.type
        values = pa.chunked_array([_whole_floats(values, "integer").cast(pa.int64())])
        note = f"whole numbers of type {kind} read as integers"
    elif pa.types.is_decimal(values.type):
        kind = values.type
        digits = [None if v is None else int(_digits(v, "integer")) for v in values.to_pylist()]
        beyond = next((n for n in digits if n is not None and not -(2**63) <= n < 2**63), None)
        if beyond is not None:
            raise SchemaError(f"has {beyond}; expected integers of 64 bits with a sign")
        values = pa.chunked_array([pa.array(digits, pa.int64())])
        note = f"{kind} read as integers"
    elif pa.types.is_null(values.type):
        values = values.cast(pa.int64())
    elif not pa.types.is_integer(values.type):
        raise type_error(values, "integer")
    if values.type == pa.uint64() and (most := pc.max(values).as_py() or 0) >= 2**63:
        raise SchemaError(f"has {most}; expected integers of 64 bits with a sign")
    numbers, null = _int64(values)
    return Times(numbers, null, given), note


def convert_times(values: pa.ChunkedArray) -> tuple[Times, str]:
    """Returns times in microseconds.

    The column is one of these, alike in all rows:

    - An Arrow timestamp or date; one without a time zone is UTC.
    - Numbers since 1970 in seconds, milliseconds, microseconds or nanoseconds, told by their size.
    - RFC 3339 text; a time without a time zone is UTC.

    Raises:
        SchemaError: If the column is none of these, or mixes units.
    """
    given = values
    values = _decode(values)
    kind = values.type
    if pa.types.is_timestamp(kind):
        times, note = _of_timestamps(values, ARROW_UNITS[kind.unit]), ""
    elif pa.types.is_date(kind):
        times = _of_timestamps(pc.cast(values, pa.timestamp("ms")), ARROW_UNITS["ms"])
        note = ISO_NOTES[DATES]
    elif is_text(kind) and not _is_number_text(values):
        times, note = _of_texts(values)
    else:
        values, _ = _numbers_of_text(values)
        times, note = _of_numbers(values)
    null = times == NULL_TIME
    return Times(np.where(null, 0, times), null, given), note


def show_time(given: pa.Scalar) -> str:
    """Returns a time as the file has it; a timestamp that no calendar holds as its number."""
    try:
        return str(given)
    except (ValueError, OverflowError):
        return f"{given.value} {given.type.unit} since 1970"


def _of_timestamps(values: pa.ChunkedArray, per_s: int) -> np.ndarray:
    """Returns [n] microseconds of timestamps of a unit, compared with the bounds in that unit."""
    raw, null = _int64(values.cast(pa.int64()))
    times = _micros(raw, per_s)
    low, end = _first_at(MIN_TIME_US, per_s), _first_at(MAX_TIME_US, per_s)
    times[(raw < low) | (raw >= end)] = OUT_OF_RANGE
    times[null] = NULL_TIME
    return times


def _first_at(time_us: int, per_s: int) -> int:
    """Returns the first whole number of a unit at or after a time."""
    return -(-time_us * per_s // 10**6)


def _micros(raw: np.ndarray, per_s: int) -> np.ndarray:
    """Returns int64 microseconds. A value out of range may wrap around; the caller masks it."""
    with np.errstate(over="ignore"):
        return raw // (per_s // 10**6) if per_s > 10**6 else raw * (10**6 // per_s)


def _of_numbers(values: pa.ChunkedArray) -> tuple[np.ndarray, str]:
    """Returns [n] microseconds of numbers since 1970, whose unit is told by their size."""
    kind = values.type
    if pa.types.is_null(kind):
        return np.full(len(values), NULL_TIME), ""
    if pa.types.is_decimal(kind):
        values = values.cast(pa.float64())
    elif pa.types.is_floating(kind) and not pa.types.is_float64(kind):
        raise SchemaError(
            f"is {kind}, which rounds times to minutes; expected timestamp, text in RFC 3339, or "
            "seconds since 1970 as int64 or double"
        )
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise type_error(values, "timestamp")
    if pa.types.is_floating(values.type):
        raw = pc.fill_null(values, float("nan")).to_numpy()
        null = np.isnan(raw)
    else:
        raw, null = _int64(values)
    found: dict[str, int] = {}  # first row of each unit
    times = np.full(len(raw), OUT_OF_RANGE, dtype=np.int64)
    for unit, per_s in UNITS_PER_S.items():
        rows = np.flatnonzero((raw >= FIRST_S * per_s) & (raw < END_S * per_s) & ~null)
        if not rows.size:
            continue
        found[unit] = int(rows[0])
        inside = raw[rows]
        if inside.dtype.kind == "f":
            times[rows] = np.rint(inside * (10**6 / per_s)).astype(np.int64)
        else:
            times[rows] = _micros(inside, per_s)
    _check_alike(found, raw)
    if not found and not null.all():
        row = int(np.flatnonzero(~null)[0])
        order = raw.dtype.kind == "i" and raw[~null].min() >= 0 and raw[~null].max() <= MAX_POSITION
        hint = "; if they only order the events, name them --column position=NAME" if order else ""
        raise RowsError(
            lambda name: (
                f"is {kind}; expected timestamp, or numbers since 1970 in "
                f"{', '.join(UNITS_PER_S)} of the years 1973 to 2255; "
                f"{name(row)} has {raw[row]}{hint}"
            )
        )
    times[null] = NULL_TIME
    word = "integers" if raw.dtype.kind == "i" else "numbers"
    return times, "".join(f"{word} read as {unit} since 1970" for unit in found)


def _of_texts(values: pa.ChunkedArray) -> tuple[np.ndarray, str]:
    """Returns [n] microseconds of texts in RFC 3339, or without a zone, or of dates."""
    encoded = _cast(values, pa.large_string()).dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    codes = pc.fill_null(encoded.indices, len(texts)).to_numpy(zero_copy_only=False)
    micros = np.full(len(texts) + 1, OUT_OF_RANGE, dtype=np.int64)
    micros[-1] = NULL_TIME
    kinds: dict[str, int] = {}  # first text of each form
    for code, text in enumerate(texts):
        parts = ISO.fullmatch(text)
        if not text:
            micros[code] = NULL_TIME
        elif parts is not None:
            kind = DATES if parts["time"] is None else ZONED if parts["zone"] else NAIVE
            kinds.setdefault(kind, code)
            micros[code] = _parse(parts)
    first = {kind: int(np.flatnonzero(codes == code)[0]) for kind, code in kinds.items()}
    _check_alike(first, values)
    if not kinds and any(texts):
        row = int(np.flatnonzero(micros[codes] != NULL_TIME)[0])
        raise RowsError(
            lambda name: (
                f"is {values.type}; expected timestamp, or text in RFC 3339 such as "
                f"2026-01-31T12:00:00Z; {name(row)} has {values[row].as_py()[:60]!r}"
            )
        )
    return micros[codes], "".join(ISO_NOTES[kind] for kind in kinds)


def _parse(parts: re.Match[str]) -> int:
    """Returns the microseconds of a text; OUT_OF_RANGE for a date that does not exist."""
    zone = (parts["zone"] or "Z").upper()
    text = f"{parts['date']}T{(parts['time'] or '00:00').replace(',', '.')}{zone}"
    try:
        micros = (datetime.datetime.fromisoformat(text) - EPOCH) // datetime.timedelta(
            microseconds=1
        )
    except (ValueError, OverflowError):
        try:  # a leap second is a time, too
            micros = math.floor(parse_timestamp(text) * 1_000_000)
        except (ValueError, OverflowError):
            return OUT_OF_RANGE
    return micros if MIN_TIME_US <= micros < MAX_TIME_US else OUT_OF_RANGE


def _check_alike(first: dict[str, int], values: Any) -> None:
    """Raises SchemaError if a column has times of several kinds. `first` is the row of each."""
    if len(first) > 1:

        def text(name: Callable[[int], str]) -> str:
            listed = [f"{kind} ({name(row)}: {values[row]})" for kind, row in first.items()]
            return f"mixes {' and '.join(listed)}; write all rows alike"

        raise RowsError(text)


def _decode(values: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = values.type
    return values.cast(kind.value_type) if pa.types.is_dictionary(kind) else values


def _cast(values: pa.ChunkedArray, kind: Any) -> pa.Array:
    return pc.cast(values, kind).combine_chunks()


def _int64(values: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Returns integers as [n] int64, OUT_OF_RANGE beyond it, and [n] bool where they are null."""
    null = np.asarray(values.is_null().to_numpy(), dtype=bool)
    if values.type == pa.uint64():
        beyond = pc.greater(values, pa.scalar(2**63 - 1, pa.uint64()))
        values = pc.if_else(beyond, None, values)
    filled = pc.fill_null(pc.cast(values, pa.int64()), OUT_OF_RANGE)
    return np.array(filled.to_numpy(), dtype=np.int64), null


def _whole_floats(values: pa.ChunkedArray, expected: str) -> pa.Array:
    """Returns whole floats as their digits; NaN is null. Raises SchemaError for other numbers."""
    kind = values.type
    numbers = pc.fill_null(values, float("nan")).to_numpy().astype(np.float64)
    null = np.isnan(numbers)
    exact = float({16: 2**11, 32: 2**24, 64: MAX_WHOLE}[kind.bit_width])
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero(~null & ((numbers != np.rint(numbers)) | (abs(numbers) > exact)))
    if wrong.size:
        raise RowsError(
            lambda name: (
                f"is {kind}; expected {expected}: {name(int(wrong[0]))} has "
                f"{numbers[wrong[0]]}, and a {kind} holds whole numbers up to {exact:.0f} only"
            )
        )
    whole = np.where(null, 0, numbers).astype(np.int64)
    return _cast(pa.chunked_array([pa.array(whole, mask=null)]), pa.large_string())


def _digits(value: Any, expected: str = "string or integer") -> str:
    if value != int(value):
        raise SchemaError(f"holds {value}; expected {expected}")
    return str(int(value))


def _is_number_text(values: pa.ChunkedArray) -> bool:
    """Whether all texts of a column are numbers, and there is one."""
    matches = pc.match_substring_regex(values, r"^-?[0-9]+(\.[0-9]+)?$")
    empty = pc.equal(pc.binary_length(values), 0)
    return bool(pc.all(pc.or_(matches, empty)).as_py() and pc.any(matches).as_py())


def _numbers_of_text(values: pa.ChunkedArray) -> tuple[pa.ChunkedArray, str]:
    """Returns a column of text as numbers if all texts are; other columns as they are."""
    if not is_text(values.type) or not _is_number_text(values):
        return values, ""
    empty = pc.equal(pc.binary_length(values), 0)
    texts = pc.if_else(empty, None, values)
    for kind in (pa.int64(), pa.float64()):
        try:
            return texts.cast(kind), "text read as numbers"
        except pa.ArrowException:
            continue
    return values, ""
