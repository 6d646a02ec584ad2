"""Changes to a catalogue. Each change set makes the next version, at the cost of the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from recserve.features.catalog.catalog import item_key, item_keys
from recserve.features.catalog.catalog_version import CatalogVersion
from recserve.features.catalog.item_records import ItemRecord, RecordLog, restored_attributes


@dataclass(frozen=True)
class ItemChange:
    """The new state of one item.

    Attributes:
        record: Title, categories and attributes.
        vector: [F] new vector, or None to leave the item's row as it is.
        codes: [L] new semantic id. It is given if and only if `vector` is given.
    """

    record: ItemRecord
    vector: np.ndarray | None = None
    codes: np.ndarray | None = None


def restored_change(change: ItemChange, schema: pa.Schema) -> ItemChange:
    """Returns a change of a journal with attributes in the form of records. Raises ValueError."""
    attributes = restored_attributes(change.record.attributes, schema)
    return replace(change, record=replace(change.record, attributes=attributes))


def changed(
    version: CatalogVersion, number: int, changes: Sequence[ItemChange], hidden: Sequence[str]
) -> CatalogVersion:
    """Returns the next version.

    Args:
        version: The version to change. It stays valid.
        number: Number of the new version.
        changes: Items to insert or update.
        hidden: Ids of items to hide. No item is named twice in `changes` and `hidden`. The
            version remembers the id of a hidden item that it does not know.

    Raises:
        ValueError: If a new item has no vector.
    """
    rows = version.known_rows([*(change.record.item_id for change in changes), *hidden])
    for change, row in zip(changes, rows, strict=False):
        if change.vector is None and row < 0:
            raise ValueError(f"item {change.record.item_id[:80]!r} is new and has no vector")
    edit = _Edit(version)
    for change, row in zip(changes, rows, strict=False):
        edit.put(change, row)
    for item_id, row in zip(hidden, rows[len(changes) :], strict=True):
        edit.hide(item_id, row)
    return edit.version(number)


def restored(version: CatalogVersion, current: CatalogVersion, number: int) -> CatalogVersion:
    """Returns an earlier version's content under a new number.

    Rows that were added since stay in the tail and belong to no item.
    """
    later = np.arange(version.num_rows, current.num_rows)
    return replace(
        version,
        number=number,
        num_rows=current.num_rows,
        gone=np.concatenate([version.gone, later]),
        successors=np.concatenate([version.successors, np.full(later.size, -1)]),
    )


def with_short_log(version: CatalogVersion) -> CatalogVersion:
    """Returns the same content with a log of its own that holds only each row's latest record."""
    log = RecordLog(version.log.schema)
    log.records = [version.log.records[place] for place in version.record_places.tolist()]
    places = np.arange(len(log.records))
    return replace(version, log=log, record_places=places, num_records=len(log.records))


@dataclass(frozen=True)
class Difference:
    """Changes from the bundle to a version.

    Attributes:
        changes: Items to insert or update, applied first.
        hidden: Ids of items to hide, applied second. It has all items that the version hides,
            known ones or not: another catalogue, or an older journal, may have such an item.
    """

    changes: tuple[ItemChange, ...]
    hidden: tuple[str, ...]

    @property
    def item_ids(self) -> set[str]:
        """Ids of all items that differ."""
        return {change.record.item_id for change in self.changes} | set(self.hidden)


def difference(version: CatalogVersion) -> Difference:
    """Returns the shortest change set from the bundle to the content of a version.

    A hidden item whose semantic id now belongs to another item appears in `hidden` only.
    """
    touched = (version.record_rows, version.key_rows, version.gone)
    rows = np.unique(np.concatenate(touched))
    names = [version.item_id(row) for row in rows.tolist()]
    current = version.rows_of_keys(item_keys(names)) == rows
    known, changes = len(version.base), []
    for row in rows[current].tolist():  # the others' items have a later row
        owns = row < known or version.owners.get(version.codes[row].tobytes()) == row
        if owns and row >= known:
            codes = version.codes[row]
            changes.append(ItemChange(version.record(row), version.vectors[row], codes))
        elif owns and np.isin(row, version.record_rows):
            changes.append(ItemChange(version.record(row)))
    return Difference(tuple(changes), tuple(version.visible.removed()))


class _Edit:
    """Collects a change set's effects on the tables of a version and applies them together."""

    def __init__(self, version: CatalogVersion) -> None:
        self.old = version
        self.num_rows = version.num_rows
        self.visible: dict[str, int] = {}
        self.keys: dict[int, int] = {}
        self.owners: dict[bytes, int] = {}
        self.gone: dict[int, int] = {}
        self.back: list[int] = []
        self.lost: list[int] = []
        self.ids: list[str] = []
        self.codes: list[np.ndarray] = []
        self.vectors: list[np.ndarray] = []
        self.learned: list[int] = []
        self.records: dict[int, int] = {}

    def put(self, change: ItemChange, row: int) -> None:
        """Inserts or updates an item. `row` is its present row, or -1."""
        item_id = change.record.item_id
        if change.vector is not None and change.codes is not None:
            row = self._new_row(item_id, row, change.vector, change.codes)
        elif self.old.is_gone(row):
            self.back.append(row)
        self.visible[item_id] = row
        log = self.old.log
        self.records[row] = len(log.records)
        log.records.append(change.record)

    def hide(self, item_id: str, row: int) -> None:
        """Excludes an item from all results. Histories that contain the item stay valid.

        `row` is its present row, or -1.
        """
        self.visible[item_id] = -1
        if row >= 0:
            self.gone[row] = -1

    def _new_row(self, item_id: str, old: int, vector: np.ndarray, codes: np.ndarray) -> int:
        """Adds a tail row for an item and retires its old row."""
        row = self.num_rows
        self.num_rows += 1
        self.ids.append(item_id)
        self.codes.append(codes)
        self.vectors.append(vector)
        self.learned.append(self.old.learned_row(old) if old >= 0 else -1)
        self.keys[item_key(item_id)] = row
        if old >= 0:
            self.gone[old] = row
            self.records.pop(old, None)
        name = codes.astype(np.uint16).tobytes()
        owner = self.old.owners.get(name)
        # The id was free: its last owner is a hidden item's row or this item's old row.
        if owner >= len(self.old.base):
            self.lost.append(owner)
        self.owners[name] = row
        return row

    def _append_rows(self) -> None:
        """Appends the new rows to the tail."""
        tail = self.old.tail
        tail.ids += self.ids
        tail.codes.append(np.stack(self.codes))
        tail.vectors.append(np.stack(self.vectors))
        tail.learned.append(np.array(self.learned))

    def version(self, number: int) -> CatalogVersion:
        """Returns the next version."""
        old = self.old
        if self.ids:
            self._append_rows()
        keys, key_rows = _merged(old.keys, old.key_rows, self.keys, np.uint64)
        gone, successors = self._gone()
        rows, places = _merged(old.record_rows, old.record_places, self.records, np.int64)
        owning = old.owning
        if self.lost:
            owning = np.delete(owning, np.searchsorted(owning, self.lost))
        return replace(
            old,
            number=number,
            num_rows=self.num_rows,
            visible=old.visible.with_rows(self.visible),
            owners=old.owners.with_rows(self.owners) if self.owners else old.owners,
            keys=keys,
            key_rows=key_rows,
            gone=gone,
            successors=successors,
            owning=np.concatenate([owning, np.arange(old.num_rows, self.num_rows)]),
            record_rows=rows,
            record_places=places,
            num_records=len(old.log.records),
        )

    def _gone(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns gone rows and their successors.

        A chain of replacements is shortened, so that each successor is the latest row.
        """
        old = self.old
        if not self.gone and not self.back:
            return old.gone, old.successors
        successors = old.successors
        replaced = [(r, new) for r, new in self.gone.items() if r >= len(old.base) and new >= 0]
        if replaced:
            successors = successors.copy()
            for row, new in replaced:
                successors[successors == row] = new
        gone, successors = _merged(old.gone, successors, self.gone, np.int64)
        if self.back:
            back = np.searchsorted(gone, self.back)
            gone, successors = np.delete(gone, back), np.delete(successors, back)
        return gone, successors


def _merged(
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
