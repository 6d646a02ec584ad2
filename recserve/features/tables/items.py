"""The item table: ids, titles, category paths and further columns of the input."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recserve.bounds import (
    MAX_CATEGORIES,
    MAX_CATEGORY_LENGTH,
    MAX_ID_LENGTH,
    MAX_TIME_US,
    MAX_TITLE_LENGTH,
    MIN_TIME_US,
    TIMES,
    format_time,
)
from recserve.features.tables.attribute_values import record_value, take_values
from recserve.features.tables.column_names import names_of_table
from recserve.features.tables.conversions import (
    ARROW_UNITS,
    Times,
    convert_ids,
    convert_split,
    convert_text,
    convert_times,
    show_time,
)
from recserve.features.tables.input_table import (
    NO_VALUE,
    InputTable,
    check_split,
    split_flag,
)
from recserve.features.tables.parquet import (
    BadRows,
    OnBadRows,
    RowCheck,
    SchemaError,
    is_list,
    is_text,
    longer_than,
    null_or_blank,
    type_error,
)

AVAILABLE_FROM, EXPIRES_AT = "available_from", "expires_at"
RESERVED = ("item_id", "title", "categories", AVAILABLE_FROM, EXPIRES_AT)
TIME_USE = {
    AVAILABLE_FROM: "times from which items are recommended, filterable",
    EXPIRES_AT: "times at which items end, filterable",
}
TIME_TYPE = pa.timestamp("us", "UTC")
OWN_COLUMNS = ("__semantic_id", "__popularity")  # of the catalogue in a bundle
ATTRIBUTE = "attribute"
CATEGORY_USE = "categories, filterable"
PATHS = pa.list_(pa.string())
PATH_FORM = '["Kitchen > Pots", "Gifts"] for [["Kitchen", "Pots"], ["Gifts"]]'
NO_GENRES = "(no genres listed)"  # MovieLens' mark of a film without a genre
# Units of an Arrow timestamp or date in a day.
PER_DAY = {"d": 1} | {unit: 86_400 * per_s for unit, per_s in ARROW_UNITS.items()}
# The days since 1970 that Python's calendar holds in every time zone.
EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()
FIRST_DAY = datetime.date.min.toordinal() + 1 - EPOCH_DAY
LAST_DAY = datetime.date.max.toordinal() - 1 - EPOCH_DAY
PIECE = 1024  # rows that are converted at a time; a server answers requests meanwhile


@dataclass(frozen=True)
class ItemTable:
    """Items by row.

    Attributes:
        ids: [I] item ids. Those of a catalogue are distinct; records of changes may repeat one.
        titles: [I] titles, "" if unknown.
        categories: [I] lists of category paths.
        attributes: Arrow table of the other columns, with one row per item.
        times: Columns `available_from` and `expires_at` of TIME_TYPE, as far as an item has one.

    Raises:
        ValueError: If the columns differ in length.
    """

    ids: list[str]
    titles: list[str]
    categories: list[list[str]]
    attributes: pa.Table
    times: pa.Table = field(default_factory=lambda: pa.table({}))

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.titles), len(self.categories)}
        for columns in (self.attributes, self.times):
            if columns.num_columns:
                lengths.add(columns.num_rows)
        if len(lengths) != 1:
            raise ValueError(f"item columns differ in length: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.ids)

    def attribute(self, row: int) -> dict[str, Any]:
        """Returns the other columns of one item by name, in the form of records."""
        if not self.attributes.num_columns:
            return {}
        names = self.attributes.column_names
        return {name: record_value(self.attributes.column(name)[row]) for name in names}

    def time(self, name: str) -> pa.ChunkedArray:
        """Returns the column `available_from` or `expires_at`, null where an item has no time."""
        if name in self.times.column_names:
            return self.times.column(name)
        return pa.chunked_array([pa.nulls(len(self), TIME_TYPE)])

    def values(self, name: str, rows: np.ndarray) -> list[Any]:
        """Returns the values [n] of any column but the ids at rows [n], in the form of records."""
        if name == "title":
            return [self.titles[row] or None for row in rows.tolist()]
        if name == "categories":
            return [self.categories[row] for row in rows.tolist()]
        if name not in TIME_USE:
            return take_values(self.attributes.column(name), rows)
        if name not in self.times.column_names:
            return [None] * rows.size
        times = take_values(self.times.column(name).cast(pa.int64()), rows)
        return [None if time_us is None else format_time(time_us) for time_us in times]

    def to_arrow(self) -> pa.Table:
        """Returns one Arrow table that `item_table` can read."""
        table = pa.table(
            {
                "item_id": pa.array(self.ids, pa.string()),
                "title": pa.array(self.titles, pa.string()),
                "categories": pa.array(self.categories, pa.list_(pa.string())),
            }
        )
        for columns in (self.times, self.attributes):
            for name in columns.column_names:
                table = table.append_column(name, columns.column(name))
        return table


def item_table(table: pa.Table) -> ItemTable:
    """Returns an ItemTable from checked columns: those of RESERVED, and attributes."""
    others = [name for name in table.column_names if name not in RESERVED]
    times = [name for name in TIME_USE if name in table.column_names]
    return ItemTable(
        _values(table.column("item_id")),
        _values(table.column("title")),
        _values(table.column("categories")),
        table.select(others),
        pa.table({name: table.column(name).cast(TIME_TYPE) for name in times}),
    )


def _values(values: pa.ChunkedArray) -> list[Any]:
    """Returns the values of a column. Other threads run between two pieces."""
    starts = range(0, len(values), PIECE)
    return [value for start in starts for value in values.slice(start, PIECE).to_pylist()]


def read_items(
    path: str | Path,
    on_bad_rows: OnBadRows = "error",
    split: Mapping[str, str] | None = None,
    columns: Mapping[str, str] | None = None,
) -> tuple[ItemTable, BadRows]:
    """Reads items from a file of Parquet, CSV or JSON lines, or from a folder of its parts.

    The columns are `item_id`, optionally `title`, `categories` (list<string>), `available_from` and
    `expires_at` (what `conversions.convert_times` reads), and any others. A null title becomes ""
    and a null category list becomes an empty list. A column without any value is ignored.

    These rows are rejected:

    - A null, empty, long or repeated `item_id`.
    - A title, a list of categories or a category that is longer than an API accepts.
    - A time out of bounds, or an item that ends before it is available.

    A folder has the parts of one file as in `event_table.read_events`.

    Args:
        path: The file or folder.
        on_bad_rows: "error" raises if a row is rejected, "skip" drops rejected rows.
        split: Separators by name of a text column, which becomes a list of texts.
        columns: Names of columns in the file by our name, as of `--column`.

    Returns:
        The items, and a report of columns and rejected rows.

    Raises:
        SchemaError: If the file is unreadable or columns are missing or mistyped.
        BadRowError: If a row is rejected under "error".
    """
    source = InputTable(Path(path), RESERVED, names_of_table(columns or {}, "items", RESERVED))
    split = {source.own_name(name): separator for name, separator in (split or {}).items()}
    rows, texts = len(source), pa.large_string()
    check_split(source, split, ("item_id", "title"))
    ids = source.require("item_id", convert_ids, "item ids, filterable", pa.nulls(rows, texts))
    titles = source.convert("title", convert_text, "titles", pa.nulls(rows, texts))
    divide = convert_split(split["categories"]) if "categories" in split else _convert_categories
    categories = source.convert("categories", divide, CATEGORY_USE, pa.nulls(rows, PATHS))
    others = _attributes(source, split)
    nothing = Times(
        np.zeros(rows, np.int64), np.ones(rows, bool), pa.chunked_array([pa.nulls(rows)])
    )
    times = {n: source.convert(n, convert_times, use, nothing) for n, use in TIME_USE.items()}
    source.check()
    check = RowCheck(source.path, rows, on_bad_rows, source.labels, source.places)
    source.reject_unreadable(check, source.table.column_names)
    _reject_ids(check, ids)
    _reject_texts(check, titles, categories)
    _reject_times(check, times)
    for name, values in others.items():
        _reject_moments(check, name, values)
    kept = check.finish()
    check.note("empty category paths, left out", _num_equal(categories.take(pa.array(kept)), ""))
    check.note(
        f"categories {NO_GENRES!r} read as no category",
        _num_equal(categories.take(pa.array(kept)), NO_GENRES),
    )
    table = pa.table(
        {
            "item_id": ids,
            "title": pc.fill_null(titles, ""),
            "categories": _without_empty(categories),
            **{n: _time_column(column) for n, column in times.items() if not column.null.all()},
            **others,
        }
    )
    return item_table(table.take(pa.array(kept))), check.report(source.columns())


def _attributes(source: InputTable, split: Mapping[str, str]) -> dict[str, pa.ChunkedArray]:
    """Returns the columns without a meaning of their own, which items keep as attributes."""
    others = {}
    for column in source.table.schema:
        name = column.name
        if name in RESERVED:
            continue
        if name in OWN_COLUMNS:
            source.problems.append(
                f"{source.path}: column {name} has a name that bundles use; rename it in the file"
            )
        elif name in split:
            nothing = pa.nulls(len(source), PATHS)
            others[name] = source.convert(name, convert_split(split[name]), ATTRIBUTE, nothing)
        elif pa.types.is_null(column.type):
            source.uses[name] = NO_VALUE + source.suggestion(name)
        else:
            others[name] = source.table.column(name)
            source.uses[name] = ATTRIBUTE + source.suggestion(name)
    return others


def _reject_ids(check: RowCheck, ids: pa.Array) -> None:
    check.refuse(
        null_or_blank(ids), "null item_id", "item_id", lambda row: "the id is null or empty"
    )
    check.refuse(
        longer_than(ids, MAX_ID_LENGTH),
        "long item_id",
        "item_id",
        lambda row: f"the id has {len(ids[row].as_py())} characters; at most {MAX_ID_LENGTH}",
    )
    encoded = pc.dictionary_encode(ids).indices.to_numpy(zero_copy_only=False)
    repeated = np.ones(len(ids), dtype=bool)
    repeated[np.unique(encoded, return_index=True)[1]] = False
    check.refuse(
        repeated,
        "duplicate item_id",
        "item_id",
        lambda row: f"{ids[row].as_py()!r} is already in an earlier row",
    )


def _reject_texts(check: RowCheck, titles: pa.Array, categories: pa.Array) -> None:
    check.refuse(
        longer_than(titles, MAX_TITLE_LENGTH),
        "long title",
        "title",
        lambda row: f"it has {len(titles[row].as_py())} characters; at most {MAX_TITLE_LENGTH}",
    )
    counts = pc.fill_null(pc.list_value_length(categories), 0).to_numpy(zero_copy_only=False)
    check.refuse(
        counts > MAX_CATEGORIES,
        "many categories",
        "categories",
        lambda row: f"the item has {counts[row]} paths; at most {MAX_CATEGORIES}",
    )
    long = np.zeros(len(titles), dtype=bool)
    parents = pc.list_parent_indices(categories).to_numpy(zero_copy_only=False)
    long[parents[longer_than(pc.list_flatten(categories), MAX_CATEGORY_LENGTH)]] = True
    check.refuse(
        long,
        "long category",
        "categories",
        lambda row: (
            f"a path has {max(len(path or '') for path in categories[row].as_py())} characters; "
            f"at most {MAX_CATEGORY_LENGTH}"
        ),
    )


def _reject_times(check: RowCheck, times: Mapping[str, Times]) -> None:
    for name, column in times.items():
        out = (column.values < MIN_TIME_US) | (column.values >= MAX_TIME_US)
        show = partial(_show_time, column)
        check.refuse(~column.null & out, f"{name} out of range", name, show)
    first, last = times[AVAILABLE_FROM], times[EXPIRES_AT]
    check.refuse(
        ~first.null & ~last.null & (first.values >= last.values),
        f"{EXPIRES_AT} before {AVAILABLE_FROM}",
        EXPIRES_AT,
        lambda row: (
            f"it is {show_time(last.given[row])}; expected a time after {AVAILABLE_FROM}, "
            f"{show_time(first.given[row])}"
        ),
    )


def _show_time(times: Times, row: int) -> str:
    return f"it is {show_time(times.given[row])}; expected {TIMES}, or null for no time"


def _time_column(times: Times) -> pa.Array:
    return pa.array(times.values, pa.int64(), mask=times.null).cast(TIME_TYPE)


def _reject_moments(check: RowCheck, name: str, values: pa.ChunkedArray) -> None:
    """Rejects rows whose time no calendar of Python holds, so that no answer could have it."""
    kind = values.type
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return
    unit = kind.unit if pa.types.is_timestamp(kind) else "ms" if kind == pa.date64() else "d"
    raw = pc.fill_null(values.cast(pa.int32() if unit == "d" else pa.int64()), 0).to_numpy()
    days = raw // PER_DAY[unit]
    check.refuse(
        (days < FIRST_DAY) | (days > LAST_DAY),
        f"{name} out of range",
        name,
        lambda row: f"it is {raw[row]} ({kind}); expected the years 1 to 9999",
    )


def _convert_categories(values: pa.ChunkedArray) -> tuple[pa.Array, str]:
    """Returns category paths as list<string>; null lists and null paths stay."""
    kind = values.type
    if is_list(kind) and (is_text(kind.value_type) or pa.types.is_null(kind.value_type)):
        return pc.cast(values, PATHS).combine_chunks(), ""
    if is_list(kind) and kind.value_type in (pa.binary(), pa.large_binary()):
        try:
            return pc.cast(values, PATHS).combine_chunks(), "bytes read as UTF-8"
        except pa.ArrowException:
            raise SchemaError(f"is {kind} and not UTF-8; expected list<string>") from None
    if is_text(kind):
        raise SchemaError(
            f"is {kind}; expected list<string>; divide the text with {split_flag(values)}"
        )
    if is_list(kind) and is_list(kind.value_type):
        raise SchemaError(
            f"is {kind}; expected list<string>; join the steps of each path, as in {PATH_FORM}"
        )
    raise type_error(values, "list<string>")


def _num_equal(categories: pa.Array, path: str) -> int:
    return int(pc.sum(pc.equal(pc.list_flatten(categories), path)).as_py() or 0)


def _without_empty(categories: pa.Array) -> pa.Array:
    """Returns category paths; null lists become empty. What is no path is left out."""
    none = (None, "", NO_GENRES)
    flat = pc.list_flatten(categories)
    if not categories.null_count and not pc.any(pc.is_in(flat, pa.array(none))).as_py():
        return categories
    lists = categories.to_pylist()
    return pa.array([[p for p in paths or [] if p not in none] for paths in lists], PATHS)
