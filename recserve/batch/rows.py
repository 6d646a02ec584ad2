"""Rows of an input table as plain values, whatever Arrow types its columns have.

A column in which no row has a value may have any type. A number may be a float or a decimal, since
tables turn integers into these where a value is missing: NaN is no value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from decimal import Decimal
from typing import Any

import pyarrow as pa

from recserve.bounds import id_of_number
from recserve.features.tables.parquet import is_list, is_text
from recserve.features.tables.plain_columns import plain_table, unreadable_rows, without_rows

Accepts = Callable[[Any], bool]


def optional(accepts: Accepts) -> Accepts:
    """Returns whether a column of a type may be given: as `accepts` says, or without a value."""
    return lambda kind: pa.types.is_null(kind) or accepts(_values(kind))


def is_any_text(kind: Any) -> bool:
    """Whether the values are text, or bytes that may be text."""
    kind = _values(kind)
    return bool(is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def is_number(kind: Any) -> bool:
    """Whether the values are numbers."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def is_id(kind: Any) -> bool:
    """Whether the values can be ids: text, or numbers, which are read row by row."""
    return is_any_text(kind) or is_number(_values(kind))


def is_list_of(accepts: Accepts) -> Accepts:
    """Returns whether a type is a list of accepted values, or of none."""
    return lambda kind: is_list(kind) and optional(accepts)(kind.value_type)


def read_rows(
    table: pa.Table, columns: Collection[str]
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Returns the rows of a table.

    Args:
        table: The table.
        columns: Columns to read; others are left out.

    Returns:
        The rows, and by row the reason why one cannot be read.
    """
    table = plain_table(table.select([name for name in table.column_names if name in columns]))
    wrong: dict[int, str] = {}
    values: dict[str, list[Any]] = {}
    for name in table.column_names:
        column = table.column(name)
        broken = unreadable_rows(column)
        if broken.size:
            column = without_rows(column, broken)
        found: list[Any] = []
        for row, value in enumerate(column.to_pylist()):
            try:
                found.append(_plain(value))
            except UnicodeDecodeError:
                wrong[row] = f"{name}: expected text in UTF-8, got other bytes"
                found.append(None)
        for row in broken.tolist():
            wrong[row] = f"{name}: expected text in UTF-8, got other bytes"
        values[name] = found
    rows = [{name: values[name][row] for name in values} for row in range(table.num_rows)]
    return rows, wrong


def id_text(given: Any) -> Any:
    """Returns an id as text; a number that stands for none as it is."""
    return given if isinstance(given, str) else id_of_number(given) or given


def _values(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _plain(value: Any) -> Any:
    """Returns a value with text for bytes, whole numbers for decimals, and None for NaN."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, Decimal):
        whole = int(value) if value.is_finite() else None
        return whole if whole == value else value
    if isinstance(value, list):
        return [_plain(one) for one in value] if _may_change(value) else value
    return value


def _may_change(values: list[Any]) -> bool:
    return any(isinstance(value, bytes | float | Decimal) for value in values)
