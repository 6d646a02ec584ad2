"""Item filters: a bounded tree of conditions, evaluated to one bool per item.

A filter F has one of these forms:

- `{"and": [F, ...]}`, `{"or": [F, ...]}` and `{"not": F}` combine filters.
- `{"eq": [field, value]}`: the field has the value.
- `{"in": [field, [value, ...]]}`: the field has one of the values.
- `{"range": [field, low, high]}`: low <= field <= high. A null end is open.

A null attribute satisfies no condition, and neither does NaN. Texts are equal if they are
canonically equivalent (`features/words.py`), ids only if their characters are.

A field is `item_id`, `categories`, `available_from`, `expires_at` or a column of the items file.
`categories` matches a whole path, each prefix of a path and each part of it. `category` is another
name of `categories`, unless the items file has a column `category`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from recserve.bounds import id_of_number
from recserve.features.catalog.filter_columns import (
    FilterColumn,
    is_usable,
    make_column,
    path_column,
    prefix_column,
    short_form,
    text_column,
)
from recserve.features.tables.items import TIME_USE, ItemTable
from recserve.features.words import closest

MAX_DEPTH = 8
MAX_CONDITIONS = 64  # `eq`, `in` and `range`; `and`, `or` and `not` only combine them
MAX_VALUES = 1000
CATEGORIES = "categories"
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


class GroupBy(NamedTuple):
    """A column whose values divide the items into groups.

    Attributes:
        field: Name of a field of filters.
        level: Of `categories`: groups are the beginnings of paths up to this level, from 0. None
            takes whole paths, or the values of another column.
    """

    field: str
    level: int | None = None


@dataclass(frozen=True)
class AbsentValue:
    """A value of a filter that no item has.

    Attributes:
        field: Name of the field.
        value: The value.
        nearest: A similar value that an item has; None if there is none, or if the field has too
            many values to compare.
    """

    field: str
    value: Any
    nearest: str | None

    def __str__(self) -> str:
        near = "" if self.nearest is None else f"; did you mean {short_form(self.nearest)}?"
        return f"{self.field[:60]}: no item has {short_form(self.value)}{near}"


class ItemFilters:
    """Evaluates filters over the items of one table. Thread-safe.

    A field's column is built at its first use. Results are not cached here, but in
    `FilterCache` of service/snapshot.py, which knows the size of an entry.

    Attributes:
        fields: Names of the fields that filters may use.
        num_items: Number of items.
    """

    def __init__(self, items: ItemTable) -> None:
        self._items = items
        self._columns: dict[str, FilterColumn] = {}
        schema = items.attributes.schema
        self._kinds = {name: schema.field(name).type for name in items.attributes.column_names}
        own = [name for name, kind in self._kinds.items() if is_usable(kind)]
        shorthand = [] if CATEGORY in self._kinds else [CATEGORY]
        self.fields = (CATEGORIES, *shorthand, ITEM_ID, *TIME_USE, *own)
        self.num_items = len(items.ids)

    def key(self, tree: Any) -> bytes:
        """Checks a filter and returns a canonical key; equal filters have equal keys.

        Raises:
            FilterError: If the tree is too deep or large, or names an unknown operator or field.
        """
        self._check(tree, "", 1, [0])
        # No value is an object, so the object of a decimal cannot be taken for another value.
        return json.dumps(
            tree, sort_keys=True, separators=(",", ":"), default=lambda value: {"": str(value)}
        ).encode()

    def evaluate(self, tree: Any) -> np.ndarray:
        """Returns [I] bool, True for items that satisfy a filter.

        Args:
            tree: Filter that `key` accepts.

        Raises:
            FilterError: If a value has the wrong type.
        """
        return self._evaluate(tree, "")

    def absent(self, values: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Returns those of the values of each field that no item has.

        Args:
            values: Literals by field, as `equal_values` returns them for a valid filter.
        """
        return {name: self._column(name).absent(given) for name, given in values.items()}

    def nearest(self, field: str, value: Any) -> str | None:
        """Returns the value of a field that resembles a text most, or None."""
        return self._column(field).nearest(value)

    def group_by(self, field: str, level: int | None) -> GroupBy:
        """Returns what a cap on a field groups by.

        Raises:
            FilterError: If the field is unknown or names each item, or has no levels.
        """
        if field not in self.fields:
            raise FilterError("field", self._unknown(field))
        if field == ITEM_ID:
            raise FilterError("field", "expected a field that items share, got 'item_id'")
        if field == CATEGORY and CATEGORY not in self._kinds:
            field = CATEGORIES
        if level is not None and field != CATEGORIES:
            raise FilterError("level", f"only {CATEGORIES} has levels, got field {field[:60]!r}")
        return GroupBy(field, level)

    def group_column(self, by: GroupBy) -> FilterColumn:
        """Returns the column whose values are the groups."""
        if by.field == CATEGORIES:
            return prefix_column(self._items.categories, by.level)
        return self._column(by.field)

    def _check(self, tree: Any, place: str, depth: int, count: list[int]) -> None:
        """Checks shape and bounds of the whole tree, before any part is evaluated.

        Args:
            tree: A part of the tree.
            place: Its position.
            depth: Its level, from 1.
            count: [1] conditions so far; the function adds those of this part.
        """
        if depth > MAX_DEPTH:
            raise FilterError(place, f"at most {MAX_DEPTH} levels, got more")
        if not isinstance(tree, dict) or len(tree) != 1:
            keys = f"one of {', '.join(OPERATORS)} as the only key"
            raise FilterError(place, f"expected {keys}, got {short_form(tree)}")
        ((operator, operand),) = tree.items()
        here = f"{place}.{operator[:40]}" if place else operator[:40]
        if operator == "not":
            self._check(operand, here, depth + 1, count)
        elif operator in ("and", "or"):
            if not isinstance(operand, list) or not operand:
                got = short_form(operand)
                raise FilterError(here, f"expected a list of one condition or more, got {got}")
            for index, part in enumerate(operand):
                self._check(part, f"{here}[{index}]", depth + 1, count)
        elif operator in OPERATORS:
            count[0] += 1
            if count[0] > MAX_CONDITIONS:
                raise FilterError(here, f"at most {MAX_CONDITIONS} conditions, got more")
            self._check_leaf(operator, operand, here)
        else:
            raise FilterError(here, f"unknown operator; known operators: {', '.join(OPERATORS)}")

    def _check_leaf(self, operator: str, operand: Any, here: str) -> None:
        """Checks field and operands of `eq`, `in` and `range`."""
        size = 3 if operator == "range" else 2
        if not isinstance(operand, list) or len(operand) != size or not isinstance(operand[0], str):
            shape = {"eq": "value", "in": "[values]", "range": "low, high"}[operator]
            raise FilterError(here, f"expected [field, {shape}], got {short_form(operand)}")
        if operand[0] not in self.fields:
            raise FilterError(here, self._unknown(operand[0]))
        if operator == "in" and not (
            isinstance(operand[1], list) and 1 <= len(operand[1]) <= MAX_VALUES
        ):
            got = short_form(operand[1])
            raise FilterError(here, f"expected a list of 1 to {MAX_VALUES} values, got {got}")
        for value in operand[1] if operator == "in" else operand[1:]:
            if isinstance(value, list | dict):
                raise FilterError(here, f"expected text, number or bool, got {short_form(value)}")

    def _unknown(self, field: str) -> str:
        """Returns the message about a field that filters cannot use."""
        near = closest(field, self.fields)
        hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(self.fields)}"
        if kind := self._kinds.get(field):
            hint = f"filters cannot read the type of this column, {kind}"
        return f"unknown field {field[:60]!r}; {hint}"

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
        try:
            if operator == "range":
                return column.within(*operand[1:])
            return column.equal(_literals(operator, operand))
        except ValueError as error:
            raise FilterError(here, f"field {operand[0]} {error}") from None

    def _column(self, name: str) -> FilterColumn:
        if name not in self._columns:
            self._columns[name] = self._make_column(name)
        return self._columns[name]

    def _make_column(self, name: str) -> FilterColumn:
        if name == ITEM_ID:
            return text_column([[i] for i in self._items.ids], exact=True)
        if name in TIME_USE:
            return make_column(self._items.time(name))
        if name in self._kinds:
            return make_column(self._items.attributes.column(name))
        return path_column(self._items.categories)


def equal_values(tree: Any) -> dict[str, list[Any]]:
    """Returns the literals of all `eq` and `in` of a valid filter by field, without repeats."""
    literals: dict[str, dict[Any, None]] = {}
    trees = [tree]
    while trees:
        ((operator, operand),) = trees.pop().items()
        if operator == "not":
            trees.append(operand)
        elif operator in ("and", "or"):
            trees += reversed(operand)
        elif operator != "range":
            values = _literals(operator, operand)
            literals.setdefault(operand[0], {}).update(dict.fromkeys(values))
    return {name: list(values) for name, values in literals.items()}


def _literals(operator: str, operand: list[Any]) -> list[Any]:
    """Returns the values of an `eq` or `in`; a number in the place of an item id is its digits."""
    values: list[Any] = operand[1] if operator == "in" else operand[1:]
    if operand[0] != ITEM_ID:
        return values
    return [value if (text := id_of_number(value)) is None else text for value in values]
