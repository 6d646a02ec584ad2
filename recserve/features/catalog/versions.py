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

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from recserve.features.catalog.catalog import Catalog, item_key, item_keys
from recserve.features.catalog.item_records import (
    OWN_FIELDS,
    ItemRecord,
    RecordLog,
    restore_attributes,
)
from recserve.features.catalog.item_times import ItemTimes
from recserve.features.tables.arrays import ExtendedArray, GrowableArray, RowMap, are_among
from recserve.features.tables.items import AVAILABLE_FROM, EXPIRES_AT, TIME_TYPE, TIME_USE

NO_ROWS = np.zeros(0, dtype=np.int64)
SCAN_GROWTH = 10  # factor by which the scan of a list grows if it finds too few items


class Tail:
    """Append-only rows after the bundle's rows, shared by all versions.

    Attributes:
        ids: Item id of each row.
        codes: [t, L] uint16 semantic ids.
        vectors: [t, F] float32 item vectors.
        first_rows: [t] int64 first row of the row's item. Counts of events belong to that row.
    """

    def __init__(self, base: Catalog) -> None:
        self.ids: list[str] = []
        self.codes = GrowableArray((base.semantic_ids.num_levels,), np.uint16)
        self.vectors = GrowableArray((base.vectors.shape[1],), np.float32)
        self.first_rows = GrowableArray((), np.int64)


class VersionName(NamedTuple):
    """The name of a version in requests and responses: `BUNDLE`, `BUNDLE.N` or `BUNDLE.EPOCH.N`.

    Attributes:
        bundle: Version of the bundle's catalogue.
        epoch: Epoch of a log that several processes write; 0 without one.
        number: Number of change sets since the bundle.
    """

    bundle: str
    epoch: int = 0
    number: int = 0

    def __str__(self) -> str:
        if not self.number:
            return self.bundle
        epoch = f".{self.epoch}" if self.epoch else ""
        return f"{self.bundle}{epoch}.{self.number}"

    @staticmethod
    def parse(text: str) -> VersionName | None:
        """Returns the parts of a name; None if it is none."""
        match = re.fullmatch(r"([^.]+)(?:\.([1-9][0-9]{0,17}))?(?:\.([1-9][0-9]{0,17}))?", text)
        if match is None:
            return None
        bundle, one, other = match.groups()
        if other is None:
            return VersionName(bundle, 0, int(one or 0))
        return VersionName(bundle, int(one), int(other))


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
        removed_rows: [g] ascending rows that must not be recommended.
        successors: [g] latest row that replaced the removed row, possibly hidden now, or -1.
        owning: Ascending tail rows that own their semantic id.
        record_rows: Ascending rows that have a record in the log.
        record_places: Index of each such record in the log.
        num_records: Visible records of the log.
        epoch: Epoch of a log of several processes, in which it stored the version; 0 elsewhere.
        time_ms: Time at which such a log stored it, in milliseconds since 1970; 0 elsewhere.
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
    removed_rows: np.ndarray
    successors: np.ndarray
    owning: np.ndarray
    record_rows: np.ndarray
    record_places: np.ndarray
    num_records: int
    epoch: int = 0
    time_ms: int = 0

    @property
    def name(self) -> str:
        """Version name in responses."""
        return str(VersionName(self.base.version, self.epoch, self.number))

    @property
    def num_tail(self) -> int:
        """Number of rows after the bundle's rows."""
        return self.num_rows - len(self.base)

    @cached_property
    def codes(self) -> ExtendedArray:
        """[num_rows, L] uint16 semantic ids."""
        return ExtendedArray(self.base.semantic_ids.codes, self.tail.codes.view(self.num_tail))

    @cached_property
    def vectors(self) -> ExtendedArray:
        """[num_rows, F] float32 item vectors."""
        return ExtendedArray(self.base.vectors, self.tail.vectors.view(self.num_tail))

    @cached_property
    def trained_rows(self) -> np.ndarray:
        """[num_tail] int64 bundle row whose events each tail row inherits, or -1."""
        first = self.tail.first_rows.view(self.num_tail)
        return np.where(first < len(self.base), first, -1)

    def trained_row(self, row: int) -> int:
        """Returns the bundle row whose training events a row inherits, or -1."""
        return row if row < len(self.base) else int(self.trained_rows[row - len(self.base)])

    def first_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns [n] int64 the first row of the item of each row [n]."""
        if not self.num_tail:
            return rows
        later = self.tail.first_rows.view(self.num_tail)[np.maximum(rows - len(self.base), 0)]
        return np.where(rows < len(self.base), rows, later)

    def item_id(self, row: int) -> str:
        """Returns the id of the item that owns or owned a row."""
        known = len(self.base)
        return self.base.items.ids[row] if row < known else self.tail.ids[row - known]

    def record(self, row: int) -> ItemRecord:
        """Returns title, categories, attributes and times of a row in this version."""
        at = int(np.searchsorted(self.record_rows, row))
        if at < self.record_rows.size and self.record_rows[at] == row:
            return self.log.records[int(self.record_places[at])]
        items = self.base.items
        attributes = {k: v for k, v in items.attribute(row).items() if v is not None}
        texts = items.ids[row], items.titles[row], items.categories[row]
        if not items.times.num_columns:
            return ItemRecord(*texts, attributes)
        times = (items.time(name)[row] for name in (AVAILABLE_FROM, EXPIRES_AT))
        return ItemRecord(*texts, attributes, *(t.value if t.is_valid else None for t in times))

    def attributes(self, row: int) -> dict[str, Any]:
        """Returns all attribute columns of a row, None where the item has no value."""
        return dict.fromkeys(self.log.schema.names) | dict(self.record(row).attributes)

    @cached_property
    def times(self) -> ItemTimes:
        """When the items may be recommended."""
        if not self.record_rows.size:
            return self.base.times
        times = self.log.times.view(self.num_records)[self.record_places]
        return self.base.times.override(self.record_rows, times)

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the columns that `fields` returns."""
        return (*OWN_FIELDS, *self.log.schema.names)

    def field_schema(self, names: Sequence[str]) -> pa.Schema:
        """Returns the Arrow types of some of `field_names`."""
        own = {"title": pa.string(), "categories": pa.list_(pa.string())}
        own |= dict.fromkeys(TIME_USE, TIME_TYPE)
        return pa.schema([(n, own.get(n) or self.log.schema.field(n).type) for n in names])

    def fields(self, rows: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
        """Returns columns of n items by name, None where an item has no value.

        Args:
            rows: [n] int64 item rows.
            names: One or more of `field_names`.
        """
        changed = are_among(rows, self.record_rows)
        own = np.flatnonzero(~changed)
        columns = [self.base.items.values(name, rows[own]) for name in names]
        found: list[dict[str, Any]] = [{}] * rows.size
        for place, values in zip(own.tolist(), zip(*columns, strict=True), strict=True):
            found[place] = dict(zip(names, values, strict=True))
        for place in np.flatnonzero(changed).tolist():
            record = self.record(int(rows[place]))
            found[place] = {name: record.value(name) for name in names}
        return found

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
            others = self.rows_of_keys(item_keys([item_ids[place] for place in lacking]))
            for place, row in zip(lacking, others.tolist(), strict=True):
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

    def are_removed(self, rows: np.ndarray) -> np.ndarray:
        """Returns [n] bool, True for rows that must not be recommended."""
        return are_among(rows, self.removed_rows)

    def is_removed(self, row: int) -> bool:
        """Whether a row must not be recommended."""
        return bool(self.are_removed(np.array(row)))

    def has_lost_id(self, row: int) -> bool:
        """Whether a row must not be recommended and has no semantic id of its own now."""
        if not self.is_removed(row):
            return False
        owner = self.owners.get(np.ascontiguousarray(self.codes[row], np.uint16).tobytes())
        if not self.epoch:
            return owner not in (-1, row)
        return row >= len(self.base) or bool(np.isin(owner, self.owning))

    def present_rows(self, first_rows: np.ndarray) -> np.ndarray:
        """Returns the rows that items have now, in the order of their first rows.

        Args:
            first_rows: int64 rows of any version. Those that are no first row, and those of items
                that are hidden or that this version does not have, are left out.
        """
        rows = first_rows[first_rows < self.num_rows]
        if self.num_tail:
            rows = rows[self.first_rows(rows) == rows]
        if not self.removed_rows.size:
            return rows
        at = np.minimum(np.searchsorted(self.removed_rows, rows), self.removed_rows.size - 1)
        rows = np.where(self.removed_rows[at] == rows, self.successors[at], rows)
        return np.asarray(rows[(rows >= 0) & ~self.are_removed(rows)])

    def newest(self, count: int) -> np.ndarray:
        """Returns up to `count` int64 rows, hidden ones included, newest first.

        An item's age is its `available_from`, or else the time at which a live catalogue got it.
        The bundle's items without a time come last, later rows of the file first.
        """
        looked_at = count
        while True:
            known = self.base.newest[:looked_at]
            known = known[~are_among(known, self.record_rows)]
            if known.size >= count or looked_at >= len(self.base):
                break
            looked_at *= SCAN_GROWTH
        rows = np.concatenate([known, self._newest_changed[:count]])
        return np.asarray(rows[np.lexsort((rows, self._ages(rows)))[::-1]][:count])

    def newer_rows(self, since_us: int) -> np.ndarray:
        """Returns the ascending rows of items that began at a time or later, see `newest`."""
        return self.times.rows[self.times.newest >= since_us]

    @cached_property
    def _newest_changed(self) -> np.ndarray:
        """[r] int64 the rows with a record, newest first."""
        rows = self.record_rows
        return np.asarray(rows[np.lexsort((rows, self._ages(rows)))[::-1]])

    def _ages(self, rows: np.ndarray) -> np.ndarray:
        """Returns [n] int64 times by which rows [n] are sorted, 0 where there is none."""
        times = self.times
        if not times.rows.size:
            return np.zeros(rows.size, np.int64)
        at = np.minimum(np.searchsorted(times.rows, rows), times.rows.size - 1)
        return np.where(times.rows[at] == rows, times.newest[at], 0)


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
        removed_rows=NO_ROWS,
        successors=NO_ROWS,
        owning=NO_ROWS,
        record_rows=NO_ROWS,
        record_places=NO_ROWS,
        num_records=0,
    )


@dataclass(frozen=True)
class ItemChange:
    """The new state of one item.

    Attributes:
        record: Title, categories, attributes and times.
        vector: [F] new vector, or None to leave the item's row as it is.
        codes: [L] new semantic id. It is given if and only if `vector` is given.
        embedding: [E] the user's own embedding, for other bundles; None if the build made the
            vectors. Only a log of several servers has it.
    """

    record: ItemRecord
    vector: np.ndarray | None = None
    codes: np.ndarray | None = None
    embedding: np.ndarray | None = None


@dataclass(frozen=True)
class ChangeSet:
    """Changes that make one catalogue version out of another.

    A change set is a request to a live catalogue, a line of its journal, or the difference between
    a bundle and a version.

    Attributes:
        number: Number of the version that it makes.
        changes: Items that are inserted or updated.
        hidden: Ids of items that are hidden. A catalogue remembers those that it does not know.
        whole: Whether it applies to the bundle's catalogue instead of the version before it.
        epoch: Epoch of a log that several processes write, in which it was stored; 0 elsewhere.
        time_ms: Time at which such a log stored it, in milliseconds since 1970; 0 elsewhere.
        writer: Identifies the change in such a log, for the process that has made it;
            empty in a snapshot.
        made_for: Version of the bundle's catalogue to which its vectors and semantic ids belong;
            empty in a file that has the version in its name.
        restored: Ids that a rollback gives back the state that they have in the bundle.
        assigned: Last position of other bundles that this change set and those before it have
            carried over; None if it is no assignment.
        remains: Whether it is what a snapshot has left of an earlier position for other bundles.
    """

    number: int
    changes: tuple[ItemChange, ...] = ()
    hidden: tuple[str, ...] = ()
    whole: bool = False
    epoch: int = 0
    time_ms: int = 0
    writer: str = ""
    made_for: str = ""
    restored: tuple[str, ...] = ()
    assigned: int | None = None
    remains: bool = False

    def __len__(self) -> int:
        return len(self.changes) + len(self.hidden)

    @property
    def item_ids(self) -> set[str]:
        """Ids of all items that it changes."""
        return {change.record.item_id for change in self.changes} | set(self.hidden)

    def split(self) -> tuple[ChangeSet, ChangeSet]:
        """Returns the insertions and, to be applied after them, the hidden items.

        A difference may insert an item and hide it. Applied in two parts, the item keeps its record
        and stays hidden.
        """
        return replace(self, hidden=(), whole=False), replace(self, changes=(), whole=False)


def restore_changes(change_set: ChangeSet, schema: pa.Schema) -> ChangeSet:
    """Returns a change set of a journal with attributes in the form of records.

    Raises:
        ValueError: If a column cannot hold its value.
    """
    changes = []
    for change in change_set.changes:
        attributes = restore_attributes(change.record.attributes, schema)
        changes.append(replace(change, record=replace(change.record, attributes=attributes)))
    return replace(change_set, changes=tuple(changes))


def apply_changes(version: CatalogVersion, change_set: ChangeSet) -> CatalogVersion:
    """Returns the next version, at the cost of the change.

    Args:
        version: The version to change. It stays valid.
        change_set: The changes. They name no item twice.

    Raises:
        ValueError: If a new item has no vector.
    """
    changes, hidden = change_set.changes, change_set.hidden
    rows = version.known_rows([*(change.record.item_id for change in changes), *hidden])
    for change, row in zip(changes, rows, strict=False):
        if change.vector is None and row < 0:
            raise ValueError(f"item {change.record.item_id[:80]!r} is new and has no vector")
    builder = VersionBuilder(version, shared=change_set.epoch > 0)
    for change, row in zip(changes, rows, strict=False):
        builder.put(change, row)
    for item_id, row in zip(hidden, rows[len(changes) :], strict=True):
        builder.hide(item_id, row)
    return builder.build(change_set)


def restore_version(
    version: CatalogVersion, current: CatalogVersion, number: int
) -> CatalogVersion:
    """Returns an earlier version's content under a new number.

    Rows that were added since stay in the tail and belong to no item.
    """
    later = np.arange(version.num_rows, current.num_rows)
    return replace(
        version,
        number=number,
        num_rows=current.num_rows,
        removed_rows=np.concatenate([version.removed_rows, later]),
        successors=np.concatenate([version.successors, np.full(later.size, -1)]),
    )


def compact_log(version: CatalogVersion) -> CatalogVersion:
    """Returns the same content with a log of its own that holds only each row's latest record."""
    log = RecordLog(version.log.schema)
    for place in version.record_places.tolist():
        log.append(version.log.records[place])
    places = np.arange(len(log.records))
    return replace(version, log=log, record_places=places, num_records=len(log.records))


def difference(version: CatalogVersion) -> ChangeSet:
    """Returns the shortest change set from the bundle to the content of a version.

    Its changes are in the order of their rows. So of two items with one semantic id, the hidden one
    comes first, and has lost it after the second one.
    """
    touched = (version.record_rows, version.key_rows, version.removed_rows)
    rows = np.unique(np.concatenate(touched))
    names = [version.item_id(row) for row in rows.tolist()]
    current = version.rows_of_keys(item_keys(names)) == rows
    known, changes = len(version.base), []
    for row in rows[current].tolist():  # the others' items have a later row
        if row >= known:
            codes = version.codes[row]
            changes.append(ItemChange(version.record(row), version.vectors[row], codes))
        elif np.isin(row, version.record_rows):
            changes.append(ItemChange(version.record(row)))
    hidden = tuple(version.visible.removed_keys())
    return ChangeSet(
        version.number, tuple(changes), hidden, epoch=version.epoch, time_ms=version.time_ms
    )


class VersionBuilder:
    """Collects a change set's effects on the tables of a version and applies them together."""

    def __init__(self, version: CatalogVersion, shared: bool = False) -> None:
        """Starts without changes.

        Args:
            version: The version to change.
            shared: Whether several servers have the version. Then scores must not depend on the
                changes that have made it: a later row that is hidden or has a successor owns no
                semantic id.
        """
        self.old, self.shared = version, shared
        self.num_rows = version.num_rows
        self.visible: dict[str, int] = {}
        self.keys: dict[int, int] = {}
        self.owners: dict[bytes, int] = {}
        self.removed: dict[int, int] = {}
        self.returned: list[int] = []
        self.disowned: list[int] = []
        self.ids: list[str] = []
        self.codes: list[np.ndarray] = []
        self.vectors: list[np.ndarray] = []
        self.first_rows: list[int] = []
        self.records: dict[int, int] = {}

    def put(self, change: ItemChange, row: int) -> None:
        """Inserts or updates an item. `row` is its present row, or -1."""
        item_id = change.record.item_id
        if change.vector is not None and change.codes is not None:
            row = self._new_row(item_id, row, change.vector, change.codes)
        elif self.old.is_removed(row):
            self.returned.append(row)
        self.visible[item_id] = row
        log = self.old.log
        self.records[row] = len(log.records)
        log.append(change.record)

    def hide(self, item_id: str, row: int) -> None:
        """Excludes an item from all results. Histories that contain the item stay valid.

        `row` is its present row, or -1.
        """
        self.visible[item_id] = -1
        if row >= 0:
            self.removed[row] = -1
        if self.shared and row >= len(self.old.base):
            self.disowned.append(row)

    def _new_row(self, item_id: str, old: int, vector: np.ndarray, codes: np.ndarray) -> int:
        """Adds a tail row for an item and retires its old row."""
        row = self.num_rows
        self.num_rows += 1
        self.ids.append(item_id)
        self.codes.append(codes)
        self.vectors.append(vector)
        self.first_rows.append(int(self.old.first_rows(np.array(old))) if old >= 0 else row)
        self.keys[item_key(item_id)] = row
        if old >= 0:
            self.removed[old] = row
            self.records.pop(old, None)
        if self.shared and old >= len(self.old.base):
            self.disowned.append(old)
        name = codes.astype(np.uint16).tobytes()
        owner = self.owners.get(name, self.old.owners.get(name))
        # The id was free: its last owner is a hidden item's row or this item's old row.
        if owner >= len(self.old.base):
            self.disowned.append(owner)
        self.owners[name] = row
        return row

    def _append_rows(self) -> None:
        """Appends the new rows to the tail."""
        tail = self.old.tail
        tail.ids += self.ids
        tail.codes.append(np.stack(self.codes))
        tail.vectors.append(np.stack(self.vectors))
        tail.first_rows.append(np.array(self.first_rows))

    def build(self, change_set: ChangeSet) -> CatalogVersion:
        """Returns the version that a change set makes."""
        old = self.old
        if self.ids:
            self._append_rows()
        keys, key_rows = _merge(old.keys, old.key_rows, self.keys, np.uint64)
        removed, successors = self._remove_rows()
        rows, places = _merge(old.record_rows, old.record_places, self.records, np.int64)
        owning = np.concatenate([old.owning, np.arange(old.num_rows, self.num_rows)])
        if self.disowned:
            owning = owning[~np.isin(owning, self.disowned)]
        return replace(
            old,
            number=change_set.number,
            epoch=change_set.epoch,
            time_ms=change_set.time_ms,
            num_rows=self.num_rows,
            visible=old.visible.with_rows(self.visible),
            owners=old.owners.with_rows(self.owners) if self.owners else old.owners,
            keys=keys,
            key_rows=key_rows,
            removed_rows=removed,
            successors=successors,
            owning=owning,
            record_rows=rows,
            record_places=places,
            num_records=len(old.log.records),
        )

    def _remove_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns removed rows and their successors.

        A chain of replacements is shortened, so that each successor is the latest row.
        """
        old = self.old
        if not self.removed and not self.returned:
            return old.removed_rows, old.successors
        successors = old.successors
        replaced = [(r, new) for r, new in self.removed.items() if r >= len(old.base) and new >= 0]
        if replaced:
            successors = successors.copy()
            for row, new in replaced:
                successors[successors == row] = new
        removed, successors = _merge(old.removed_rows, successors, self.removed, np.int64)
        if self.returned:
            back = np.searchsorted(removed, self.returned)
            removed, successors = np.delete(removed, back), np.delete(successors, back)
        return removed, successors


def _merge(
    keys: np.ndarray, values: np.ndarray, changes: dict[int, int], kind: type
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ascending keys and their values after changes."""
    if not changes:
        return keys, values
    new: np.ndarray = np.fromiter(changes, kind, len(changes))
    order = np.argsort(new)
    new, new_values = new[order], np.fromiter(changes.values(), np.int64, len(changes))[order]
    at = np.searchsorted(keys, new)
    same = np.zeros(len(new), dtype=bool)
    inside = at < len(keys)
    same[inside] = keys[at[inside]] == new[inside]
    values = values.copy()
    values[at[same]] = new_values[same]
    fresh = ~same
    return np.insert(keys, at[fresh], new[fresh]), np.insert(values, at[fresh], new_values[fresh])
