"""A version of a live catalogue: the bundle's catalogue and what changed since.

An item's row never changes what it means: its vector and semantic id stay. A new vector gives the
item a new row, and the old one is gone; new words (title, categories, attributes) keep the row. So
cached roots never go stale, and a request that began with a version ends with it. Rows of all
versions live in one tail, records in one log; a version knows how far it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from recserve.features.catalog.catalog import Catalog, item_keys
from recserve.features.catalog.item_records import ItemRecord, RecordLog
from recserve.features.catalog.row_map import RowMap
from recserve.features.catalog.row_tables import Extended, Growing, are_among

NO_ROWS = np.zeros(0, dtype=np.int64)


class Tail:
    """Rows after the bundle's, of all versions; only ever appended.

    codes, vectors: as in Catalog. learned: the bundle's row whose events the row inherits, -1:
    none.
    """

    def __init__(self, base: Catalog) -> None:
        self.ids: list[str] = []
        self.codes = Growing((base.index.num_levels,), np.uint16)
        self.vectors = Growing((base.vectors.shape[1],), np.float32)
        self.learned = Growing((), np.int64)


@dataclass(frozen=True)
class CatalogVersion:
    """Immutable. number: change sets since the bundle; 0 is the bundle itself.

    num_rows: rows of bundle and tail. visible: item id to row, of items that may be answered.
    owners: bytes of a semantic id that the bundle lacks or that changed hands, to its row.
    keys [p] uint64 ascending, key_rows [p]: rows of changed items by item key, hidden ones too.
    gone [g] ascending: rows that must not be answered; successors [g]: the row that came last in
    their place (which may be hidden now), -1: none did. owning: rows of the tail that have their
    semantic id, ascending.
    record_rows ascending, record_places: rows with a record in the log. num_records: of the log.
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
        """What answers call it."""
        return f"{self.base.version}.{self.number}" if self.number else self.base.version

    @property
    def num_tail(self) -> int:
        """Rows after the bundle's."""
        return self.num_rows - len(self.base)

    @cached_property
    def codes(self) -> Extended:
        """[num_rows, L] semantic ids."""
        return Extended(self.base.index.codes, self.tail.codes.view(self.num_tail))

    @cached_property
    def vectors(self) -> Extended:
        """[num_rows, F]."""
        return Extended(self.base.vectors, self.tail.vectors.view(self.num_tail))

    @cached_property
    def learned(self) -> np.ndarray:
        """[rows of the tail] the bundle's row whose events each inherits, -1: none."""
        return self.tail.learned.view(self.num_tail)

    def learned_row(self, row: int) -> int:
        """The bundle's row whose events a row inherits, -1: none."""
        return row if row < len(self.base) else int(self.learned[row - len(self.base)])

    def item_id(self, row: int) -> str:
        """Id of the item that a row is or was of."""
        known = len(self.base)
        return self.base.items.ids[row] if row < known else self.tail.ids[row - known]

    def record(self, row: int) -> ItemRecord:
        """Title, categories and attributes in this version."""
        at = int(np.searchsorted(self.record_rows, row))
        if at < self.record_rows.size and self.record_rows[at] == row:
            return self.log.records[int(self.record_places[at])]
        items = self.base.items
        said = {k: v for k, v in items.attribute(row).items() if v is not None}
        return ItemRecord(items.ids[row], items.titles[row], items.categories[row], said)

    def attributes(self, row: int) -> dict[str, Any]:
        """All of the catalogue's columns, None where the item says nothing."""
        return dict.fromkeys(self.log.schema.names) | dict(self.record(row).attributes)

    def popularity(self, row: int) -> float:
        """Training events of the item."""
        learned = self.learned_row(row)
        return float(self.base.popularity[learned]) if learned >= 0 else 0.0

    def rows_of_keys(self, keys: np.ndarray) -> np.ndarray:
        """[n] int64 row of each uint64 item key, hidden items too; -1 where it is unknown."""
        rows = self.base.rows_of_keys(keys).astype(np.int64)
        if not self.keys.size:
            return rows
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.key_rows[at], rows)

    def rows_by_key(self, item_ids: Sequence[str]) -> list[int]:
        """Row of each item or of another with the same 64-bit key, hidden or not; -1: no such."""
        rows = self.visible.get_many(item_ids)
        lacking = [place for place, row in enumerate(rows) if row < 0]
        if lacking:
            found = self.rows_of_keys(item_keys([item_ids[place] for place in lacking]))
            for place, row in zip(lacking, found.tolist(), strict=True):
                rows[place] = row
        return rows

    def check_key(self, item_id: str, row: int) -> None:
        """Raises ValueError where `rows_by_key` found the row of another item."""
        if row >= 0 and self.item_id(row) != item_id:
            raise ValueError(
                f"items {item_id!r} and {self.item_id(row)!r} have the same 64-bit "
                "key; choose another id"
            )

    def known_rows(self, item_ids: Sequence[str]) -> list[int]:
        """Row of each item, hidden or not; -1 where it is unknown.

        Raises ValueError for an unknown item whose 64-bit key another item has.
        """
        rows = self.rows_by_key(item_ids)
        for item_id, row in zip(item_ids, rows, strict=True):
            self.check_key(item_id, row)
        return rows

    def are_gone(self, rows: np.ndarray) -> np.ndarray:
        """[n] bool: rows that must not be answered."""
        return are_among(rows, self.gone)

    def is_gone(self, row: int) -> bool:
        """Whether a row must not be answered."""
        return bool(self.are_gone(np.array(row)))

    def popular(self, count: int) -> np.ndarray:
        """At least `count` rows that may be answered (all, if there are fewer), most popular first.

        Items that came after the bundle stand last, in their order.
        """
        head = self.base.popular[: count + self.gone.size].astype(np.int64)
        if self.gone.size:
            at = np.minimum(np.searchsorted(self.gone, head), self.gone.size - 1)
            head = np.where(self.gone[at] == head, self.successors[at], head)
            head = head[(head >= 0) & ~self.are_gone(head)]
        if head.size >= count or not self.num_tail:
            return head
        fresh = np.flatnonzero(self.learned < 0) + len(self.base)
        return np.concatenate([head, fresh[~self.are_gone(fresh)]])


def first_version(base: Catalog, rows: dict[str, int]) -> CatalogVersion:
    """The bundle's own catalogue. rows: item id to row."""
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
