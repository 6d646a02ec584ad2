"""Columns of items that filters compare, each with the exact order of its type."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recserve.features.tables.attribute_values import (
    BEYOND,
    DAY_MS,
    Bounds,
    decimal_bounds,
    is_number,
    is_temporal,
    number_bounds,
    plain_type,
    round_to,
    temporal_bounds,
)
from recserve.features.words import canonical, closest

MAX_COMPARED = 2000  # distinct texts; to compare this many with one text takes about 20 ms


@dataclass(frozen=True)
class Memberships:
    """Which items have which value of a column.

    Attributes:
        keys: The distinct values.
        rows: [m] int64 item row of each pair of an item and a value. No pair occurs twice.
        values: [m] int64 index in `keys` of each pair. The rows of a value are ascending.
    """

    keys: Sequence[Hashable]
    rows: np.ndarray
    values: np.ndarray


class FilterColumn(Protocol):
    """One column of I items. A method raises ValueError for a literal of another type."""

    def equal(self, values: Sequence[Any]) -> np.ndarray:
        """Returns [I] bool, True where the column has one of the values."""

    def within(self, low: Any, high: Any) -> np.ndarray:
        """Returns [I] bool, True where low <= value <= high. None leaves an end open."""

    def absent(self, values: Sequence[Any]) -> list[Any]:
        """Returns those of the values that no item has."""

    def nearest(self, value: Any) -> str | None:
        """Returns the text of the column that resembles a value most, or None."""

    def memberships(self) -> Memberships:
        """Returns which items have which value. Null and NaN are no values."""


@dataclass(frozen=True)
class TextColumn:
    """A column of strings or of lists of strings.

    Attributes:
        rows: int32 rows of each value, by its canonical form.
        num_items: I.
        exact: Whether texts are equal only if their characters are, as those of ids.
    """

    rows: dict[str, np.ndarray]
    num_items: int
    exact: bool = False

    def equal(self, values: Sequence[Any]) -> np.ndarray:
        """Returns [I] bool, True where the column has one of the values."""
        out = np.zeros(self.num_items, dtype=bool)
        for value in values:
            if not isinstance(value, str):
                raise ValueError(f"is compared with text, got {short_form(value)}")
            rows = self.rows.get(value if self.exact else canonical(value))
            if rows is not None:  # most ids of an `in` list are not in this segment of the log
                out[rows] = True
        return out

    def within(self, low: Any, high: Any) -> np.ndarray:
        """Raises ValueError."""
        raise ValueError("is text and has no range")

    def absent(self, values: Sequence[Any]) -> list[Any]:
        """Returns those of the values that no item has."""
        return [v for v in values if (v if self.exact else canonical(v)) not in self.rows]

    def nearest(self, value: Any) -> str | None:
        """Returns the text of the column that resembles a value most, or None."""
        if len(self.rows) > MAX_COMPARED:
            return None
        near = closest(value[:256], self.rows)
        return near[0] if near else None

    def memberships(self) -> Memberships:
        """Returns which items have which value; a list may repeat a value."""
        found = [rows[np.diff(rows, prepend=-1) > 0] for rows in self.rows.values()]
        sizes = [rows.size for rows in found]
        rows = np.concatenate([np.zeros(0, np.int64), *found])
        return Memberships(list(self.rows), rows, np.repeat(np.arange(len(sizes)), sizes))


@dataclass(frozen=True)
class WholeColumn:
    """A column whose values are whole numbers of some unit: integers, booleans, decimals, times.

    Attributes:
        values: [I] integers, 0 for null. Decimals beyond 64 bits are Python integers.
        valid: [I] bool, False for null; None if there is no null.
        bounds: Returns the units below and above a literal. They are equal if the literal is a
            whole number of units. Raises ValueError, with the expected type, for another type.
        is_bool: True for a column of booleans.
    """

    values: np.ndarray
    valid: np.ndarray | None
    bounds: Callable[[Any], Bounds]
    is_bool: bool = False

    def equal(self, values: Sequence[Any]) -> np.ndarray:
        """Returns [I] bool, True where the column has one of the values."""
        units = [unit for unit in map(self._unit, values) if unit is not None]
        return self._mask_nulls(np.isin(self.values, np.array(units, self.values.dtype)))

    def within(self, low: Any, high: Any) -> np.ndarray:
        """Returns [I] bool, True where low <= value <= high. None leaves an end open."""
        try:
            of_low = None if low is None else self.bounds(low)
            of_high = None if high is None else self.bounds(high)
        except ValueError as error:
            raise ValueError(_ends(str(error), low, high)) from None
        if of_low is not None and of_high is not None:
            # Two numbers between the same whole ones have equal bounds.
            numbers = is_number(low) and is_number(high)
            _check_order(low, high, of_low > of_high or (numbers and low > high))
        least = None if of_low is None else of_low[1]
        most = None if of_high is None else of_high[0]
        out = np.ones(len(self.values), dtype=bool)
        # The least and the greatest value of the type: NumPy rounds what is beyond them.
        limits = (-BEYOND, BEYOND)
        if self.values.dtype != object:
            limits = np.iinfo(self.values.dtype).min, np.iinfo(self.values.dtype).max
        if least is not None:
            out &= (self.values >= max(least, limits[0])) if least <= limits[1] else False
        if most is not None:
            out &= (self.values <= min(most, limits[1])) if most >= limits[0] else False
        return self._mask_nulls(out)

    def absent(self, values: Sequence[Any]) -> list[Any]:
        """Returns those of the values that no item has."""
        units = [self._unit(value) for value in values]
        fit = np.array([unit for unit in units if unit is not None], self.values.dtype)
        known = self.values if self.valid is None else self.values[self.valid]
        there = set(fit[np.isin(fit, known)].tolist())
        return [value for value, unit in zip(values, units, strict=True) if unit not in there]

    def nearest(self, value: Any) -> None:
        """Returns None: the number is not a misspelt one."""

    def memberships(self) -> Memberships:
        """Returns which items have which value."""
        return _members(self.values, self.valid)

    def _unit(self, value: Any) -> int | None:
        """Returns the units that equal a literal; None if no value of the column's type does."""
        try:
            if self.is_bool and not isinstance(value, bool):
                raise ValueError("true or false")
            below, above = self.bounds(int(value) if self.is_bool else value)
        except ValueError as error:
            raise ValueError(f"is compared with {error}, got {short_form(value)}") from None
        if below != above:
            return None
        if self.values.dtype == object:
            return below
        limits = np.iinfo(self.values.dtype)
        return below if limits.min <= below <= limits.max else None

    def _mask_nulls(self, out: np.ndarray) -> np.ndarray:
        return out if self.valid is None else out & self.valid


@dataclass(frozen=True)
class FloatColumn:
    """A column of floating-point numbers. A literal is rounded to the type of the column.

    Attributes:
        values: [I] float16, float32 or float64, NaN for null.
    """

    values: np.ndarray

    def equal(self, values: Sequence[Any]) -> np.ndarray:
        """Returns [I] bool, True where the column has one of the values."""
        return np.isin(self.values, self._round(values))

    def within(self, low: Any, high: Any) -> np.ndarray:
        """Returns [I] bool, True where low <= value <= high. None leaves an end open."""
        if not all(end is None or is_number(end) for end in (low, high)):
            raise ValueError(_ends("a number", low, high))
        kind = self.values.dtype
        least = -np.inf if low is None else round_to(low, kind)
        most = np.inf if high is None else round_to(high, kind)
        _check_order(low, high, bool(least > most))
        return np.asarray((self.values >= least) & (self.values <= most))

    def absent(self, values: Sequence[Any]) -> list[Any]:
        """Returns those of the values that no item has."""
        there = np.isin(self._round(values), self.values)
        return [value for value, found in zip(values, there, strict=True) if not found]

    def nearest(self, value: Any) -> None:
        """Returns None: the number is not a misspelt one."""

    def memberships(self) -> Memberships:
        """Returns which items have which value; -0 is 0."""
        return _members(self.values, ~np.isnan(self.values))

    def _round(self, values: Sequence[Any]) -> np.ndarray:
        for value in values:
            if not is_number(value):
                raise ValueError(f"is compared with a number, got {short_form(value)}")
        kind = self.values.dtype
        return np.array([round_to(value, kind) for value in values], kind)


def is_usable(kind: Any) -> bool:
    """Whether filters can read columns of an Arrow type."""
    kind = plain_type(kind)
    types = pa.types
    return bool(
        _is_text(kind)
        or (types.is_list(kind) or types.is_large_list(kind))
        and _is_text(kind.value_type)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_decimal(kind)
        or is_temporal(kind)
    )


def make_column(column: pa.ChunkedArray) -> FilterColumn:
    """Returns an attribute column, of a type that `is_usable` accepts, for comparisons."""
    kind, types = plain_type(column.type), pa.types
    if kind != column.type:
        column = pc.cast(column, kind)
    if types.is_floating(kind):
        values = np.asarray(column.to_numpy(), kind.to_pandas_dtype())
        return FloatColumn(values)
    if types.is_integer(kind):
        return WholeColumn(_integers(column), _valid(column), number_bounds)
    if types.is_boolean(kind):
        flags = _integers(pc.cast(column, pa.uint8()))
        return WholeColumn(flags, _valid(column), number_bounds, is_bool=True)
    if types.is_decimal(kind):
        bounds = partial(decimal_bounds, scale=kind.scale)
        return WholeColumn(_unscale(column), _valid(column), bounds)
    if is_temporal(kind):
        ticks = _integers(pc.cast(column, pa.int32() if kind.bit_width == 32 else pa.int64()))
        if types.is_date64(kind):
            ticks = ticks // DAY_MS * DAY_MS
        return WholeColumn(ticks, _valid(column), temporal_bounds(kind))
    texts = column.to_pylist()
    if _is_text(kind):
        return text_column([[] if value is None else [value] for value in texts])
    return text_column([[v for v in value or [] if v is not None] for value in texts])


def path_column(categories: Sequence[Sequence[str]]) -> TextColumn:
    """Returns category paths as a column that has each path's prefixes and parts too."""
    return text_column([_parts(paths) for paths in categories])


def prefix_column(categories: Sequence[Sequence[str]], level: int | None) -> TextColumn:
    """Returns the beginnings of category paths up to a level, from 0; None takes whole paths."""
    length = None if level is None else level + 1
    return text_column(
        [[" > ".join(path.split(" > ")[:length]) for path in paths] for paths in categories]
    )


def text_column(values: Sequence[Sequence[str]], exact: bool = False) -> TextColumn:
    """Builds a text column from the values of each row. `exact`: as in `TextColumn`."""
    rows: dict[str, list[int]] = {}
    for row, found in enumerate(values):
        for value in found:
            rows.setdefault(value if exact else canonical(value), []).append(row)
    arrays = {value: np.array(found, dtype=np.int32) for value, found in rows.items()}
    return TextColumn(arrays, len(values), exact)


def short_form(value: Any) -> str:
    """Returns at most 60 characters of a value as JSON, for messages.

    A list is shown by its length, an object by its keys.
    """
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, value))[:60] or 'nothing'}"
    if is_number(value):
        return str(value)[:60] if not isinstance(value, int) or abs(value) < 10**60 else "a number"
    return json.dumps(value, default=str, ensure_ascii=False)[:60]


def _members(values: np.ndarray, valid: np.ndarray | None) -> Memberships:
    """Returns which items have which of the values [I]."""
    rows = np.arange(len(values)) if valid is None else np.flatnonzero(valid)
    keys, places = np.unique(values[rows], return_inverse=True)
    return Memberships(keys.tolist(), rows, places.reshape(-1).astype(np.int64))


def _ends(expected: str, low: Any, high: Any) -> str:
    wanted = "numbers" if expected == "a number" else expected
    return (
        f"has a range whose ends are {wanted} or null, got {short_form(low)} and {short_form(high)}"
    )


def _check_order(low: Any, high: Any, inverted: bool) -> None:
    """Raises ValueError for a range whose low end is above its high end: no item is in it."""
    if inverted:
        raise ValueError(
            "has a range whose low end is above its high end, "
            f"got {short_form(low)} and {short_form(high)}"
        )


def _valid(column: pa.ChunkedArray) -> np.ndarray | None:
    return np.asarray(column.is_valid().to_numpy()) if column.null_count else None


def _integers(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray((pc.fill_null(column, 0) if column.null_count else column).to_numpy())


def _unscale(column: pa.ChunkedArray) -> np.ndarray:
    """Returns [I] the digits of decimals as integers: int64 if 18 digits suffice, else objects."""
    bits = column.type.bit_width
    small = column.type.precision <= 18
    parts = [np.zeros(0, np.int64 if small else object)]
    for chunk in column.chunks:
        if not len(chunk):
            continue
        start, stop = chunk.offset, chunk.offset + len(chunk)
        data = chunk.buffers()[1]
        if bits == 32:
            parts.append(np.frombuffer(data, np.int32)[start:stop].astype(np.int64))
            continue
        words = np.frombuffer(data, np.int64)[: stop * (bits // 64)].reshape(stop, -1)[start:]
        if small:
            parts.append(words[:, 0])
            continue
        # Words go from the least significant one to the one that has the sign.
        unscaled = words[:, -1].astype(object)
        for word in words.T[-2::-1]:
            unscaled = unscaled * 2**64 + word.astype(np.uint64).astype(object)
        parts.append(unscaled)
    unscaled = np.concatenate(parts)
    valid = _valid(column)
    return unscaled if valid is None else np.where(valid, unscaled, 0)


def _parts(paths: Sequence[str]) -> list[str]:
    """Returns `A`, `B` and `A > B` for each path `A > B`."""
    found: set[str] = set()
    for path in paths:
        parts = path.split(" > ")
        found.update(parts)
        found.update(" > ".join(parts[: depth + 1]) for depth in range(len(parts)))
    return sorted(found)


def _is_text(kind: Any) -> bool:
    kind = plain_type(kind)
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or kind == pa.string_view())
