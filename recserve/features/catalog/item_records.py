"""Records: what an item says of itself (title, categories, attributes), as a log of changes."""

from __future__ import annotations

import difflib
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from recserve.features.catalog.filters import ItemFilters

SEGMENT = 1024


@dataclass(frozen=True)
class ItemRecord:
    """One item in its latest words. attributes: of the catalogue's columns, absent where null."""

    item_id: str
    title: str
    categories: list[str]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class RecordTable:
    """Records as columns; an item may be there more than once."""

    ids: list[str]
    categories: list[list[str]]
    attributes: pa.Table

    @staticmethod
    def of(records: Sequence[ItemRecord], schema: pa.Schema) -> RecordTable:
        """schema: of the attributes."""
        rows = [dict(record.attributes) for record in records]
        return RecordTable(
            [record.item_id for record in records],
            [record.categories for record in records],
            pa.Table.from_pylist(rows, schema=schema),
        )

    def __len__(self) -> int:
        return len(self.ids)


class RecordLog:
    """Records in the order they came, only ever appended; a version knows a beginning of it.

    schema: of the catalogue's attributes.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.records: list[ItemRecord] = []
        self._full: list[ItemFilters] = []
        self._partial: tuple[int, ItemFilters] | None = None
        self._by_path: dict[str, list[int]] = {}
        self._followed = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.records)

    def allowed(self, tree: Any, count: int) -> np.ndarray:
        """Returns [count] bool, which of the first records fulfil a filter that has a key.

        Raises:
            FilterError: If a value has the wrong type.
        """
        parts = [np.zeros(0, dtype=bool)]
        for number, filters in enumerate(self._filters(count)):
            parts.append(filters.evaluate(tree)[: count - number * SEGMENT])
        return np.concatenate(parts)

    def of_category(self, path: str, count: int) -> list[int]:
        """Places, ascending, of the first records that hold this whole category path; every record
        is looked at once, whoever asks.
        """
        with self._lock:
            for place in range(self._followed, count):
                for said in dict.fromkeys(self.records[place].categories):
                    self._by_path.setdefault(said, []).append(place)
            self._followed = max(self._followed, count)
            places = self._by_path.get(path, [])
            return places[: bisect_left(places, count)]

    def _filters(self, count: int) -> list[ItemFilters]:
        """Filters of all full segments, and of the rest."""
        with self._lock:
            while (len(self._full) + 1) * SEGMENT <= len(self.records):
                self._full.append(self._make(len(self._full) * SEGMENT, SEGMENT))
            needed = -(-count // SEGMENT)
            if needed <= len(self._full):
                return self._full[:needed]
            first = len(self._full) * SEGMENT
            if self._partial is None or self._partial[0] != count:
                self._partial = (count, self._make(first, count - first))
            return [*self._full, self._partial[1]]

    def _make(self, first: int, count: int) -> ItemFilters:
        return ItemFilters(RecordTable.of(self.records[first : first + count], self.schema))


def checked_attributes(given: Mapping[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """Attributes in the types of the catalogue's columns, nulls left out.

    Raises ValueError naming an unknown attribute or a value of another type.
    """
    checked = {}
    for name, value in given.items():
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, 1)
            known = f"did you mean {near[0]}?" if near else _listed(schema)
            raise ValueError(f"unknown attribute {name[:60]!r}; {known}")
        kind = schema.field(name).type
        try:
            number = type(value) is int and pa.types.is_floating(kind)
            converted = pa.scalar(float(value) if number else value, kind).as_py()
            if not _alike(value, converted, kind):
                raise TypeError
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise ValueError(f"{name[:60]}: expected {kind}, got {str(value)[:60]!r}") from None
        if converted is not None:
            checked[name] = converted
    return checked


def _alike(value: Any, converted: Any, kind: Any) -> bool:
    """Whether Arrow only changed the form: it cuts numbers, counts with truths and splits texts."""
    if pa.types.is_integer(kind) and converted != value:
        return False
    return isinstance(value, bool | list) == isinstance(converted, bool | list)


def _listed(schema: pa.Schema) -> str:
    return f"there are {', '.join(schema.names)}" if schema.names else "this catalogue has none"
