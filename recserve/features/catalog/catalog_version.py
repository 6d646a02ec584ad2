"""One version of a live catalogue: the bundle's catalogue plus later changes.

A row never changes its vector or its semantic id. A new vector gives the item a new row and retires
the old one. New text (title, categories, attributes) leaves the row as it is. Cached prefixes
therefore never become stale, and a request ends with the version that it began with.

    rows:   0 ............. I-1 | I ............ num_rows-1 | later versions
            bundle's catalogue  | tail, as this version sees it

All versions share one append-only tail of rows and one append-only log of records. A version stores
how much of each it can see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from recserve.features.catalog.catalog import Catalog, item_keys
from recserve.features.catalog.item_records import ItemRecord, RecordLog
from recserve.features.catalog.row_tables import Extended, Growing, RowMap, are_among

NO_ROWS = np.zeros(0, dtype=np.int64)


class Tail:
    """Append-only rows after the bundle's rows, shared by all versions.

    Attributes:
        ids: Item id of each row.
        codes: [t, L] uint16 semantic ids.
        vectors: [t, F] float32 item vectors.
        learned: [t] int64 bundle row whose training events the row inherits, or -1.
    """

    def __init__(self, base: Catalog) -> None:
        self.ids: list[str] = []
        self.codes = Growing((base.index.num_levels,), np.uint16)
        self.vectors = Growing((base.vectors.shape[1],), np.float32)
        self.learned = Growing((), np.int64)


@dataclass(frozen=True)
class CatalogVersion:
    """An immutable version of the catalogue.

    Attributes:
        number: Number of change sets since the bundle. 0 is the bundle itself.
        base: The bundle's catalogue of I items.
        tail: Rows after the bundle's.
        log: Records of changed items.
        num_rows: Visible rows of bundle and tail together.
        visible: Row of each item id that may be recommended.
        owners: Row of each semantic id that is new or has changed owner, keyed by its bytes.
        keys: [p] uint64 ascending keys of items with a tail row, hidden items included.
        key_rows: [p] latest row of each key.
        gone: [g] ascending rows that must not be recommended.
        successors: [g] latest row that replaced the gone row, possibly hidden now, or -1.
        owning: Ascending tail rows that own their semantic id.
        record_rows: Ascending rows that have a record in the log.
        record_places: Index of each such record in the log.
        num_records: Visible records of the log.
    """

    number: int
    base: Catalog
    tail: Tail
    log: RecordLog
    num_rows: int
    visible: RowMap[str]
    owners: RowMap[bytes]
    keys: np.ndarray
    key_rows: np.ndarray
    gone: np.ndarray
    successors: np.ndarray
    owning: np.ndarray
    record_rows: np.ndarray
    record_places: np.ndarray
    num_records: int

    @property
    def name(self) -> str:
        """Version name in responses."""
        return f"{self.base.version}.{self.number}" if self.number else self.base.version

    @property
    def num_tail(self) -> int:
        """Number of rows after the bundle's rows."""
        return self.num_rows - len(self.base)

    @cached_property
    def codes(self) -> Extended:
        """[num_rows, L] uint16 semantic ids."""
        return Extended(self.base.index.codes, self.tail.codes.view(self.num_tail))

    @cached_property
    def vectors(self) -> Extended:
        """[num_rows, F] float32 item vectors."""
        return Extended(self.base.vectors, self.tail.vectors.view(self.num_tail))

    @cached_property
    def learned(self) -> np.ndarray:
        """[num_tail] int64 bundle row whose events each tail row inherits, or -1."""
        return self.tail.learned.view(self.num_tail)

    def learned_row(self, row: int) -> int:
        """Returns the bundle row whose training events a row inherits, or -1."""
        return row if row < len(self.base) else int(self.learned[row - len(self.base)])

    def item_id(self, row: int) -> str:
        """Returns the id of the item that owns or owned a row."""
        known = len(self.base)
        return self.base.items.ids[row] if row < known else self.tail.ids[row - known]

    def record(self, row: int) -> ItemRecord:
        """Returns title, categories and attributes of a row in this version."""
        at = int(np.searchsorted(self.record_rows, row))
        if at < self.record_rows.size and self.record_rows[at] == row:
            return self.log.records[int(self.record_places[at])]
        items = self.base.items
        attributes = {k: v for k, v in items.attribute(row).items() if v is not None}
        return ItemRecord(items.ids[row], items.titles[row], items.categories[row], attributes)

    def attributes(self, row: int) -> dict[str, Any]:
        """Returns all attribute columns of a row, None where the item has no value."""
        return dict.fromkeys(self.log.schema.names) | dict(self.record(row).attributes)

    def popularity(self, row: int) -> float:
        """Returns the number of training events of a row's item."""
        learned = self.learned_row(row)
        return float(self.base.popularity[learned]) if learned >= 0 else 0.0

    def rows_of_keys(self, keys: np.ndarray) -> np.ndarray:
        """Returns [n] int64 rows of uint64 item keys, hidden items included, -1 if unknown."""
        rows = self.base.rows_of_keys(keys).astype(np.int64)
        if not self.keys.size:
            return rows
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.key_rows[at], rows)

    def rows_by_key(self, item_ids: Sequence[str]) -> list[int]:
        """Returns the row of each item's 64-bit key, hidden or not, or -1.

        The row may belong to another item with the same key; `check_key` detects that.
        """
        rows = self.visible.get_many(item_ids)
        lacking = [place for place, row in enumerate(rows) if row < 0]
        if lacking:
            found = self.rows_of_keys(item_keys([item_ids[place] for place in lacking]))
            for place, row in zip(lacking, found.tolist(), strict=True):
                rows[place] = row
        return rows

    def check_key(self, item_id: str, row: int) -> None:
        """Raises ValueError if the row that `rows_by_key` returned belongs to another item."""
        if row >= 0 and self.item_id(row) != item_id:
            raise ValueError(
                f"items {item_id!r} and {self.item_id(row)!r} have the same 64-bit "
                "key; choose another id"
            )

    def known_rows(self, item_ids: Sequence[str]) -> list[int]:
        """Returns the row of each item, hidden or not, or -1 for an unknown item.

        Raises:
            ValueError: If an unknown item has the same 64-bit key as another item.
        """
        rows = self.rows_by_key(item_ids)
        for item_id, row in zip(item_ids, rows, strict=True):
            self.check_key(item_id, row)
        return rows

    def are_gone(self, rows: np.ndarray) -> np.ndarray:
        """Returns [n] bool, True for rows that must not be recommended."""
        return are_among(rows, self.gone)

    def is_gone(self, row: int) -> bool:
        """Whether a row must not be recommended."""
        return bool(self.are_gone(np.array(row)))

    def popular(self, count: int) -> np.ndarray:
        """Returns int64 rows that may be recommended, most popular first.

        Items added after the bundle come last, in row order.

        Args:
            count: Least number of rows to return. Fewer are returned if the catalogue has fewer.
        """
        # At most `gone.size` of the most popular rows are gone, so this many rows suffice.
        head = self.base.popular[: count + self.gone.size].astype(np.int64)
        if self.gone.size:
            at = np.minimum(np.searchsorted(self.gone, head), self.gone.size - 1)
            # A replaced row passes its rank on to its successor.
            head = np.where(self.gone[at] == head, self.successors[at], head)
            head = head[(head >= 0) & ~self.are_gone(head)]
        if head.size >= count or not self.num_tail:
            return head
        fresh = np.flatnonzero(self.learned < 0) + len(self.base)
        return np.concatenate([head, fresh[~self.are_gone(fresh)]])


def first_version(base: Catalog, rows: dict[str, int]) -> CatalogVersion:
    """Returns version 0, the bundle's own catalogue.

    Args:
        base: The bundle's catalogue.
        rows: Row of each item id.
    """
    log = RecordLog(base.items.attributes.schema)
    return CatalogVersion(
        number=0,
        base=base,
        tail=Tail(base),
        log=log,
        num_rows=len(base),
        visible=RowMap(rows),
        owners=RowMap({}),
        keys=np.zeros(0, np.uint64),
        key_rows=NO_ROWS,
        gone=NO_ROWS,
        successors=NO_ROWS,
        owning=NO_ROWS,
        record_rows=NO_ROWS,
        record_places=NO_ROWS,
        num_records=0,
    )
