"""The item table: ids, titles, category paths and further columns of the input."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recserve.features.tables.attribute_values import record_value
from recserve.features.tables.parquet import (
    BadRows,
    OnBadRows,
    RowCheck,
    SchemaError,
    column,
    id_column,
    is_text,
    null_or_blank,
    read_table,
    text_column,
)

RESERVED = ("item_id", "title", "categories")
PIECE = 1024  # rows that are converted at a time; a server answers requests meanwhile


@dataclass(frozen=True)
class ItemTable:
    """Items by row.

    Attributes:
        ids: [I] distinct item ids.
        titles: [I] titles, "" if unknown.
        categories: [I] lists of category paths.
        attributes: Arrow table of the other columns, with one row per item.

    Raises:
        ValueError: If the columns differ in length or an id appears twice.
    """

    ids: list[str]
    titles: list[str]
    categories: list[list[str]]
    attributes: pa.Table

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.titles), len(self.categories)}
        if self.attributes.num_columns:
            lengths.add(self.attributes.num_rows)
        if len(lengths) != 1:
            raise ValueError(f"item columns differ in length: {sorted(lengths)}")
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("item ids must be distinct")

    def __len__(self) -> int:
        return len(self.ids)

    def attribute(self, row: int) -> dict[str, Any]:
        """Returns the other columns of one item by name, in the form of records."""
        if not self.attributes.num_columns:
            return {}
        names = self.attributes.column_names
        return {name: record_value(self.attributes.column(name)[row]) for name in names}

    def to_arrow(self) -> pa.Table:
        """Returns one Arrow table that `item_table` can read."""
        table = pa.table(
            {
                "item_id": pa.array(self.ids, pa.string()),
                "title": pa.array(self.titles, pa.string()),
                "categories": pa.array(self.categories, pa.list_(pa.string())),
            }
        )
        for name in self.attributes.column_names:
            table = table.append_column(name, self.attributes.column(name))
        return table


def item_table(table: pa.Table) -> ItemTable:
    """Returns an ItemTable from checked columns: `item_id`, `title`, `categories`, attributes."""
    others = [name for name in table.column_names if name not in RESERVED]
    return ItemTable(
        _values(table.column("item_id")),
        _values(table.column("title")),
        _values(table.column("categories")),
        table.select(others),
    )


def _values(values: pa.ChunkedArray) -> list[Any]:
    """Returns the values of a column. Other threads run between two pieces."""
    starts = range(0, len(values), PIECE)
    return [value for start in starts for value in values.slice(start, PIECE).to_pylist()]


def read_items(path: str | Path, on_bad_rows: OnBadRows = "error") -> tuple[ItemTable, BadRows]:
    """Reads items from Parquet.

    The columns are `item_id`, optionally `title` and `categories` (list<string>), and any others. A
    null title becomes "" and a null category list becomes an empty list. A null, empty or repeated
    `item_id` rejects the row.

    Args:
        path: Parquet file.
        on_bad_rows: "error" raises at the first rejected row, "skip" drops rejected rows.

    Returns:
        The items, and a report of rejected rows.

    Raises:
        SchemaError: If the file is unreadable or a column is missing or mistyped.
        BadRowError: If a row is rejected under "error".
    """
    path = Path(path)
    table = read_table(path)
    ids = id_column(table, path, "item_id")
    rows = table.num_rows
    check = RowCheck(path, rows, on_bad_rows)
    check.refuse(
        null_or_blank(ids), "null item_id", "item_id", lambda row: "the id is null or empty"
    )
    encoded = pc.dictionary_encode(ids).indices.to_numpy(zero_copy_only=False)
    repeated = np.ones(rows, dtype=bool)
    repeated[np.unique(encoded, return_index=True)[1]] = False
    check.refuse(
        repeated,
        "duplicate item_id",
        "item_id",
        lambda row: f"{ids[row].as_py()!r} is already in an earlier row",
    )
    if "title" in table.column_names:
        titles = pc.fill_null(text_column(table, path, "title"), "")
    else:
        titles = pa.repeat("", rows)
    checked = pa.table({"item_id": ids, "title": titles, "categories": _categories(table, path)})
    for name in table.column_names:
        if name not in RESERVED:
            checked = checked.append_column(name, table.column(name))
    kept = checked.filter(pa.array(check.kept))
    if kept.num_rows == 0:
        raise SchemaError(f"{path}: no usable rows among {rows}")
    return item_table(kept), check.report()


def _categories(table: pa.Table, path: Path) -> pa.Array:
    """Returns category paths as list<string>; null lists become empty, null paths are dropped."""
    kind = pa.list_(pa.string())
    if "categories" not in table.column_names:
        return pa.array([[]] * table.num_rows, kind)

    def accepts(given: Any) -> bool:
        return bool(pa.types.is_list(given) or pa.types.is_large_list(given)) and is_text(
            given.value_type
        )

    values = column(table, path, "categories", accepts, "list<string>")
    if values.null_count == 0 and pc.list_flatten(values).null_count == 0:
        return pc.cast(values, kind).combine_chunks()
    return pa.array([[p for p in paths or [] if p] for paths in values.to_pylist()], kind)
