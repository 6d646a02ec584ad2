"""Item records (title, categories, attributes) and an append-only log of their changes."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from recserve.bounds import format_time
from recserve.features.catalog.filter_columns import short_form
from recserve.features.catalog.filters import GroupBy, ItemFilters
from recserve.features.catalog.item_times import NO_END, NO_START, NOT_ADDED
from recserve.features.tables.arrays import GrowableArray
from recserve.features.tables.attribute_values import has_json_form, parse_value, record_column
from recserve.features.tables.items import (
    AVAILABLE_FROM,
    EXPIRES_AT,
    TIME_TYPE,
    TIME_USE,
    ItemTable,
)
from recserve.features.words import closest

SEGMENT = 1024
OWN_FIELDS = ("title", "categories", AVAILABLE_FROM, EXPIRES_AT)


@dataclass(frozen=True)
class ItemRecord:
    """The latest text and attributes of an item.

    Attributes:
        item_id: Id of the item.
        title: Title.
        categories: Category paths.
        attributes: Values of the catalogue's attribute columns, in the form that
            `tables/attribute_values.py` describes. A null value is absent.
        available_from: Time from which it is recommended, in microseconds since 1970, or None.
        expires_at: Time at which it ends, or None.
        added_at: Time at which a live catalogue got the item; None for an item of the bundle.
    """

    item_id: str
    title: str
    categories: list[str]
    attributes: Mapping[str, Any]
    available_from: int | None = None
    expires_at: int | None = None
    added_at: int | None = None

    def value(self, name: str) -> Any:
        """Returns a column in the form of records; None if the item has no value."""
        if name == "title":
            return self.title or None
        if name in TIME_USE:
            time_us = self.available_from if name == AVAILABLE_FROM else self.expires_at
            return None if time_us is None else format_time(time_us)
        return self.categories if name == "categories" else self.attributes.get(name)


@dataclass
class RecordGroups:
    """The groups of the first records of a log by one column.

    Attributes:
        keys: Values of each record.
        places: Ascending places of the records with each value.
    """

    keys: list[list[Hashable]] = field(default_factory=list)
    places: dict[Hashable, list[int]] = field(default_factory=dict)


class RecordLog:
    """Append-only log of records. Each version of the catalogue sees a prefix of the log.

    Filters are built per segment of 1024 records, so a growing log costs little to filter.

    Attributes:
        schema: Arrow schema of the catalogue's attributes.
        records: Records in the order in which they were added.
        times: [n, 3] times of each record, as `ItemTimes.override` reads them.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.records: list[ItemRecord] = []
        self.times = GrowableArray((3,), np.int64)
        self._full: list[ItemFilters] = []
        self._partial: tuple[int, ItemFilters] | None = None
        self._groups: dict[GroupBy, RecordGroups] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.records)

    def append(self, record: ItemRecord) -> None:
        """Adds a record. Only one thread may append."""
        times = (
            record.available_from or NO_START,
            record.expires_at or NO_END,
            record.added_at or NOT_ADDED,
        )
        self.times.append(np.array([times]))
        self.records.append(record)

    def allowed(self, tree: Any, count: int) -> np.ndarray:
        """Returns [count] bool, True for the first records that satisfy a filter.

        Args:
            tree: Filter that `ItemFilters.key` accepts.
            count: Number of records.

        Raises:
            FilterError: If a value has the wrong type.
        """
        parts = [np.zeros(0, dtype=bool)]
        for number, filters in enumerate(self._filters(count)):
            parts.append(filters.evaluate(tree)[: count - number * SEGMENT])
        return np.concatenate(parts)

    def absent(self, values: dict[str, list[Any]], count: int) -> dict[str, list[Any]]:
        """Returns those of the values of each field that none of the first `count` records has.

        Args:
            values: Literals by field, as `equal_values` returns them for a valid filter.
            count: Number of records.
        """
        for filters in self._filters(count):
            values = filters.absent(values)
        return values

    def groups(self, by: GroupBy, count: int) -> RecordGroups:
        """Returns the groups of at least the first `count` records by a column.

        All calls for a column together read each record once.
        """
        with self._lock:
            known = self._groups.setdefault(by, RecordGroups())
            first = len(known.keys)
            if first < count:
                column = self._build_filters(first, count - first).group_column(by)
                found = column.memberships()
                keys: list[list[Hashable]] = [[] for _ in range(count - first)]
                for row, value in zip(found.rows.tolist(), found.values.tolist(), strict=True):
                    key = found.keys[value]
                    keys[row].append(key)
                    known.places.setdefault(key, []).append(first + row)
                known.keys += keys
            return known

    def _filters(self, count: int) -> list[ItemFilters]:
        """Returns the filters of the full segments, then those of the partial last segment."""
        with self._lock:
            while (len(self._full) + 1) * SEGMENT <= len(self.records):
                self._full.append(self._build_filters(len(self._full) * SEGMENT, SEGMENT))
            needed = -(-count // SEGMENT)
            if needed <= len(self._full):
                return self._full[:needed]
            first = len(self._full) * SEGMENT
            if self._partial is None or self._partial[0] != count:
                self._partial = (count, self._build_filters(first, count - first))
            return [*self._full, self._partial[1]]

    def _build_filters(self, first: int, count: int) -> ItemFilters:
        """Builds the filters of `count` records from `first` on."""
        return ItemFilters(record_table(self.records[first : first + count], self.schema))


def record_table(records: Sequence[ItemRecord], schema: pa.Schema) -> ItemTable:
    """Returns records as the rows of a table. `schema` describes the attributes."""
    columns = {
        field.name: record_column([r.attributes.get(field.name) for r in records], field.type)
        for field in schema
    }
    return ItemTable(
        [record.item_id for record in records],
        [record.title for record in records],
        [record.categories for record in records],
        pa.table(columns),
        pa.table(
            {
                AVAILABLE_FROM: pa.array([r.available_from for r in records], TIME_TYPE),
                EXPIRES_AT: pa.array([r.expires_at for r in records], TIME_TYPE),
            }
        ),
    )


def check_attributes(given: Mapping[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """Returns attributes in the form of records, without nulls.

    Raises:
        ValueError: If an attribute is unknown, or its column cannot hold the value exactly.
    """
    checked = {}
    for name, value in given.items():
        if name not in schema.names:
            near = closest(name, [*schema.names, *OWN_FIELDS])
            known = f"did you mean {near[0]}?" if near else _list_attributes(schema)
            raise ValueError(f"unknown attribute {name[:60]!r}; {known}")
        kind = schema.field(name).type
        try:
            converted = parse_value(value, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise ValueError(f"{name[:60]}: expected {kind}, got {short_form(value)}") from None
        if converted is not None:
            checked[name] = converted
    return checked


def restore_attributes(stored: Mapping[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """Returns the attributes of a journal in the form of records.

    Raises:
        ValueError: If a column cannot hold its value.
    """
    texts = {
        name: value
        for name, value in stored.items()
        if name in schema.names and has_json_form(schema.field(name).type)
    }
    return {**stored, **check_attributes(texts, schema)}


def _list_attributes(schema: pa.Schema) -> str:
    """Names the attributes of a catalogue, for messages."""
    return f"known: {', '.join(schema.names)}" if schema.names else "this catalogue has none"
