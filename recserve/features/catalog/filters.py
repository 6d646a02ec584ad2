"""Item filters: a bounded tree of conditions, evaluated to one bool per item.

A filter F has one of these forms:

- `{"and": [F, ...]}`, `{"or": [F, ...]}` and `{"not": F}` combine filters.
- `{"eq": [field, value]}`: the field has the value.
- `{"in": [field, [value, ...]]}`: the field has one of the values.
- `{"range": [field, low, high]}`: low <= field <= high. A null end is open.

A null attribute satisfies no condition. `category` matches a whole path, each prefix of a path and
each part of it.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_DEPTH = 8
MAX_NODES = 64
MAX_VALUES = 1000
CATEGORY = "category"
ITEM_ID = "item_id"
OPERATORS = ("and", "or", "not", "eq", "in", "range")


class FilterError(ValueError):
    """A filter is invalid.

    Attributes:
        param: Position in the filter tree, such as `and[1].eq`.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class FilterColumns(Protocol):
    """Columns of n items that filters read, from an ItemTable or from records."""

    @property
    def ids(self) -> list[str]:
        """[n] item ids."""

    @property
    def categories(self) -> list[list[str]]:
        """[n] lists of category paths."""

    @property
    def attributes(self) -> pa.Table:
        """Table of the other columns."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class TextColumn:
    """A column of strings or of lists of strings.

    Attributes:
        rows: int32 rows of each value.
    """

    rows: dict[str, np.ndarray]

    def equal(self, value: Any, out: np.ndarray) -> None:
        """Sets `out` [I] where the column has the value. Raises ValueError for another type."""
        if not isinstance(value, str):
            raise ValueError(f"is compared with text, got {_shown(value)}")
        rows = self.rows.get(value)
        if rows is not None:  # most ids of an `in` list are not in this segment of the log
            out[rows] = True


@dataclass(frozen=True)
class Numbers:
    """A column of numbers or booleans.

    Attributes:
        values: [I] float64, booleans as 0 and 1, NaN for null.
        is_bool: True for a column of booleans.
    """

    values: np.ndarray
    is_bool: bool

    def equal(self, value: Any, out: np.ndarray) -> None:
        """Sets `out` [I] where the column has the value. Raises ValueError for another type."""
        if isinstance(value, bool) != self.is_bool or not isinstance(value, int | float):
            kind = "true or false" if self.is_bool else "a number"
            raise ValueError(f"is compared with {kind}, got {_shown(value)}")
        out |= self.values == _number(value)


class ItemFilters:
    """Evaluates filters over the items of one table. Thread-safe.

    A field's column is built at its first use. Results are not cached here, but in
    `service/catalog/filter_cache.py`, which knows the size of an entry.

    Attributes:
        fields: Names of the fields that filters may use.
    """

    def __init__(self, items: FilterColumns) -> None:
        self._items = items
        self._columns: dict[str, TextColumn | Numbers] = {}
        schema = items.attributes.schema
        kinds = {name: schema.field(name).type for name in items.attributes.column_names}
        self.fields = (CATEGORY, ITEM_ID, *(n for n, kind in kinds.items() if _usable(kind)))

    def key(self, tree: Any) -> bytes:
        """Checks a filter and returns a canonical key; equal filters have equal keys.

        Raises:
            FilterError: If the tree is too deep or large, or names an unknown operator or field.
        """
        self._check(tree, "", 1, [0])
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()

    def evaluate(self, tree: Any) -> np.ndarray:
        """Returns [I] bool, True for items that satisfy a filter.

        Args:
            tree: Filter that `key` accepts.

        Raises:
            FilterError: If a value has the wrong type.
        """
        return self._evaluate(tree, "")

    def _check(self, tree: Any, place: str, depth: int, nodes: list[int]) -> None:
        """Checks shape and bounds of the whole tree, before any part is evaluated."""
        nodes[0] += 1
        if depth > MAX_DEPTH:
            raise FilterError(place, f"at most {MAX_DEPTH} levels, got more")
        if nodes[0] > MAX_NODES:
            raise FilterError(place, f"at most {MAX_NODES} conditions, got more")
        if not isinstance(tree, dict) or len(tree) != 1:
            keys = f"one of {', '.join(OPERATORS)} as the only key"
            raise FilterError(place, f"expected {keys}, got {_shown(tree)}")
        ((operator, operand),) = tree.items()
        here = f"{place}.{operator[:40]}" if place else operator[:40]
        if operator == "not":
            self._check(operand, here, depth + 1, nodes)
        elif operator in ("and", "or"):
            if not isinstance(operand, list) or not operand:
                got = _shown(operand)
                raise FilterError(here, f"expected a list of one condition or more, got {got}")
            for index, part in enumerate(operand):
                self._check(part, f"{here}[{index}]", depth + 1, nodes)
        elif operator in OPERATORS:
            self._check_leaf(operator, operand, here)
        else:
            raise FilterError(here, f"unknown operator; known operators: {', '.join(OPERATORS)}")

    def _check_leaf(self, operator: str, operand: Any, here: str) -> None:
        """Checks field and operands of `eq`, `in` and `range`."""
        size = 3 if operator == "range" else 2
        if not isinstance(operand, list) or len(operand) != size or not isinstance(operand[0], str):
            shape = {"eq": "value", "in": "[values]", "range": "low, high"}[operator]
            raise FilterError(here, f"expected [field, {shape}], got {_shown(operand)}")
        if operand[0] not in self.fields:
            near = difflib.get_close_matches(operand[0], self.fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(self.fields)}"
            raise FilterError(here, f"unknown field {operand[0][:60]!r}; {hint}")
        if operator == "in" and not (
            isinstance(operand[1], list) and 1 <= len(operand[1]) <= MAX_VALUES
        ):
            got = _shown(operand[1])
            raise FilterError(here, f"expected a list of 1 to {MAX_VALUES} values, got {got}")
        for value in operand[1] if operator == "in" else operand[1:]:
            if isinstance(value, list | dict):
                raise FilterError(here, f"expected text, number or bool, got {_shown(value)}")
        if operator == "range":
            for end in operand[1:]:
                if end is not None and (isinstance(end, bool) or not isinstance(end, int | float)):
                    raise FilterError(here, f"ends are numbers or null, got {_shown(end)}")

    def _evaluate(self, tree: dict[str, Any], place: str) -> np.ndarray:
        ((operator, operand),) = tree.items()
        here = f"{place}.{operator}" if place else operator
        if operator == "not":
            return ~self._evaluate(operand, here)
        if operator in ("and", "or"):
            parts = [self._evaluate(p, f"{here}[{i}]") for i, p in enumerate(operand)]
            join = np.logical_and if operator == "and" else np.logical_or
            return np.asarray(join.reduce(parts))
        column = self._column(operand[0])
        out = np.zeros(len(self._items), dtype=bool)
        if operator == "range":
            if not isinstance(column, Numbers):
                raise FilterError(here, f"field {operand[0]} is text and has no range")
            low, high = operand[1:]
            out[:] = ~np.isnan(column.values)
            if low is not None:
                out &= column.values >= _number(low)
            if high is not None:
                out &= column.values <= _number(high)
            return out
        try:
            for value in operand[1] if operator == "in" else operand[1:]:
                column.equal(value, out)
        except ValueError as error:
            raise FilterError(here, f"field {operand[0]} {error}") from None
        return out

    def _column(self, name: str) -> TextColumn | Numbers:
        if name not in self._columns:
            self._columns[name] = self._make_column(name)
        return self._columns[name]

    def _make_column(self, name: str) -> TextColumn | Numbers:
        if name == ITEM_ID:
            return _texts([[i] for i in self._items.ids])
        if name == CATEGORY:
            return _texts([_parts(paths) for paths in self._items.categories])
        column = self._items.attributes.column(name)
        if _is_number(column.type) or pa.types.is_boolean(column.type):
            values = pc.fill_null(pc.cast(column, pa.float64(), safe=False), float("nan"))
            return Numbers(values.to_numpy(), pa.types.is_boolean(column.type))
        values = column.to_pylist()
        if _is_list(column.type):
            return _texts([[v for v in value or [] if v is not None] for value in values])
        return _texts([[] if value is None else [value] for value in values])


def _number(value: float) -> float:
    """Converts to float64; an integer beyond its range becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _texts(values: list[list[str]]) -> TextColumn:
    """Builds a text column from the values of each row."""
    rows: dict[str, list[int]] = {}
    for row, found in enumerate(values):
        for value in found:
            rows.setdefault(value, []).append(row)
    return TextColumn({value: np.array(found, dtype=np.int32) for value, found in rows.items()})


def _parts(paths: list[str]) -> list[str]:
    """Returns `A`, `B` and `A > B` for each path `A > B`."""
    found: set[str] = set()
    for path in paths:
        parts = path.split(" > ")
        found.update(parts)
        found.update(" > ".join(parts[: depth + 1]) for depth in range(len(parts)))
    return sorted(found)


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_text(
        kind.value_type
    )


def _shown(value: Any) -> str:
    """Returns a short form of a value: a list by its length, an object by its keys."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, value))[:60] or 'nothing'}"
    return json.dumps(value)[:60]


def _usable(kind: Any) -> bool:
    return _is_number(kind) or _is_text(kind) or _is_list(kind) or bool(pa.types.is_boolean(kind))
