"""The rules by which one bundle takes over the item changes of another one.

For an item that was changed in the other bundle:

- An item that was put and that the bundle does not have is inserted.
- An item that was put and that the bundle has keeps the bundle's title, categories, attributes and
  times. It becomes visible if an earlier change had hidden it.
- An item that was hidden is hidden. A catalogue that does not have it remembers that it is hidden,
  for a later bundle that has it.
- An item that a rollback in the other bundle has given back its state before all changes becomes
  visible if the bundle has it, and is hidden if not.

Vectors and semantic ids belong to a bundle, so inserted items get new ones. The item's own
embedding is used again if both bundles were built from embeddings of the same length.

Two places use the rules: a swap within a server (`replacement`), and a shared log of two bundles
(`live_catalog`). To apply them twice changes nothing more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from recserve.bounds import format_time
from recserve.features.catalog.item_records import ItemRecord, restore_attributes
from recserve.features.catalog.versions import CatalogVersion, ChangeSet, ItemChange
from recserve.features.tables.items import AVAILABLE_FROM, EXPIRES_AT


@dataclass
class OtherChanges:
    """The latest change of each item in other bundles.

    Attributes:
        put: Items that were put, by id.
        hidden: Ids of hidden items.
        restored: Ids that a rollback has given back their state before all changes.
    """

    put: dict[str, ItemChange] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    restored: set[str] = field(default_factory=set)

    @staticmethod
    def of(change_sets: Iterable[ChangeSet], schema: pa.Schema) -> OtherChanges:
        """Returns what change sets of other bundles have done, in order.

        Args:
            change_sets: The change sets.
            schema: Attributes of the catalogue that takes them over. It gets no others.
        """
        found = OtherChanges()
        for change_set in change_sets:
            for change in change_set.changes:
                found._forget(change.record.item_id)
                found.put[change.record.item_id] = _fit(change, schema)
            for names, ids in (
                (found.restored, change_set.restored),
                (found.hidden, change_set.hidden),
            ):
                for item_id in ids:
                    found._forget(item_id)
                    names.add(item_id)
        return found

    def _forget(self, item_id: str) -> None:
        self.put.pop(item_id, None)
        self.hidden.discard(item_id)
        self.restored.discard(item_id)

    def bodies(
        self, items: CatalogVersion, size: int | None, override: Collection[str] = ()
    ) -> list[dict[str, Any]]:
        """Returns the items to put into a catalogue, as the body of a request.

        Args:
            items: Version of the catalogue.
            size: Length of the embeddings from which its bundle was built, or None.
            override: Ids of items whose latest record replaces that of the bundle.
        """
        puts = list(_put_bodies(list(self.put.values()), items, size, override))
        shown = [item_id for item_id in self.restored if _is_built(items, item_id)]
        return puts + [
            {"item_id": item_id} for item_id in sorted(shown) if items.visible.get(item_id) < 0
        ]

    def to_hide(self, items: CatalogVersion) -> tuple[str, ...]:
        """Returns the ids to hide in a catalogue."""
        gone = [
            item_id
            for item_id in self.restored
            if items.visible.get(item_id) >= 0 and not _is_built(items, item_id)
        ]
        return tuple(sorted(self.hidden.difference(items.visible.removed_keys()).union(gone)))

    @property
    def added_at(self) -> dict[str, int | None]:
        """Times of addition by item."""
        return {item_id: change.record.added_at for item_id, change in self.put.items()}


def _fit(change: ItemChange, schema: pa.Schema) -> ItemChange:
    """Returns a change of a log with the attributes that a catalogue has, in the form of records.

    A value that its column cannot hold stays as it is, and the item is refused later.
    """
    record = change.record
    known = {name: value for name, value in record.attributes.items() if name in schema.names}
    with contextlib.suppress(ValueError):
        known = restore_attributes(known, schema)
    return replace(change, record=replace(record, attributes=known))


def _is_built(items: CatalogVersion, item_id: str) -> bool:
    """Whether an item is one of the bundle's own."""
    row = items.rows_by_key([item_id])[0]
    return row >= 0 and items.item_id(row) == item_id and items.trained_row(row) >= 0


def _put_bodies(
    changes: Sequence[ItemChange],
    items: CatalogVersion,
    size: int | None,
    override: Collection[str],
) -> Iterator[dict[str, Any]]:
    """Yields the items to put."""
    rows = items.rows_by_key([change.record.item_id for change in changes])
    for change, row in zip(changes, rows, strict=True):
        record = change.record
        known = row >= 0 and items.item_id(row) == record.item_id
        built = known and items.trained_row(row) >= 0
        visible = known and not items.is_removed(row)
        if built and record.item_id not in override:
            if not visible:
                yield {"item_id": record.item_id}
        elif not visible or not _same(items.record(row), record, items):
            yield _put_body(change, items, None if known else size)


def _put_body(change: ItemChange, items: CatalogVersion, size: int | None) -> dict[str, Any]:
    record = change.record
    names = items.log.schema.names
    body: dict[str, Any] = {
        "item_id": record.item_id,
        "title": record.title,
        "categories": record.categories,
        "attributes": {name: record.attributes.get(name) for name in names},
        AVAILABLE_FROM: _moment(record.available_from),
        EXPIRES_AT: _moment(record.expires_at),
    }
    if change.embedding is not None and len(change.embedding) == size:
        body["embedding"] = change.embedding.tolist()
    return body


def _same(one: ItemRecord, other: ItemRecord, items: CatalogVersion) -> bool:
    """Returns True if both records agree in every field that the catalogue has."""
    names = items.log.schema.names
    fields = [
        (each.title, list(each.categories), each.available_from, each.expires_at)
        for each in (one, other)
    ]
    return fields[0] == fields[1] and all(
        one.attributes.get(name) == other.attributes.get(name) for name in names
    )


def _moment(time_us: int | None) -> str | None:
    return None if time_us is None else format_time(time_us)
