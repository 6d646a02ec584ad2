"""Carries live item changes over to the catalogue of another bundle.

The rules, for an item that was changed while the old bundle was served:

- An item that was put and that the new bundle does not have is inserted.
- An item that was put and that the new bundle has keeps the new bundle's title, categories and
  attributes. It becomes visible if an earlier change had hidden it.
- An item that was hidden is hidden. A catalogue that does not have it remembers that it is hidden,
  for a later bundle that has it.
- Ids in `override` (a rollback passes all changes since the old bundle was loaded) get their latest
  title, categories and attributes in any case.

Vectors and semantic ids belong to a bundle, so inserted items get new ones. The item's own
embedding is used again if both bundles were built from embeddings of the same length.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recserve.features.catalog.catalog_version import CatalogVersion
from recserve.features.catalog.item_records import ItemRecord
from recserve.features.catalog.live_catalog import ItemChange, difference
from recserve.schemas.items import MAX_ITEMS, ItemsRequest
from recserve.service.catalog.live_items import LiveItems

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CarriedItems:
    """What one pass has changed in the new catalogue.

    Attributes:
        put: Number of inserted or updated items.
        hidden: Number of hidden items.
        refused: Reason by item id, for items that the new catalogue cannot hold.
    """

    put: int
    hidden: int
    refused: Mapping[str, str]


def carry_over(old: LiveItems, new: LiveItems, override: Collection[str] = ()) -> CarriedItems:
    """Applies the item changes of a live catalogue to the catalogue of another bundle.

    A second pass applies only what has changed since the first.

    Args:
        old: The catalogue that has changed.
        new: The catalogue that gets the changes.
        override: Ids of items whose latest record replaces the record of the new bundle.

    Raises:
        JournalError: If the journal of the new catalogue cannot be written.
    """
    version = old.current.items
    said = difference(version)
    hidden = set(said.hidden)
    size = _embedding_size(old, new)
    wanted = [change for change in said.changes if change.record.item_id not in hidden]
    puts = list(_puts(wanted, new, frozenset(override), size))
    refused: dict[str, str] = {}
    for first in range(0, len(puts), MAX_ITEMS):
        part = puts[first : first + MAX_ITEMS]
        for rejection in new.put(ItemsRequest(items=part)).rejected:
            refused[part[rejection.index]["item_id"]] = rejection.reason
    current = new.current.items
    gone = [item_id for item_id in said.hidden if current.visible.get(item_id) >= 0]
    if news := hidden.difference(current.visible.removed()):
        new.hide(*sorted(news), unknown=True)
    for item_id, reason in list(refused.items())[:10]:
        log.warning("item %s was not carried over to the new bundle: %s", item_id[:80], reason)
    return CarriedItems(len(puts) - len(refused), len(gone), refused)


def _puts(
    changes: list[ItemChange], new: LiveItems, override: frozenset[str], size: int | None
) -> Iterator[dict[str, Any]]:
    """Yields the bodies of the items to put. `size` is the length of shared embeddings."""
    items = new.current.items
    rows = items.rows_by_key([change.record.item_id for change in changes])
    for change, row in zip(changes, rows, strict=True):
        record = change.record
        known = row >= 0 and items.item_id(row) == record.item_id
        built = known and items.learned_row(row) >= 0
        shown = known and not items.is_gone(row)
        if built and record.item_id not in override:
            if not shown:
                yield {"item_id": record.item_id}
        elif not shown or not _same(items.record(row), record, items):
            yield _put(change, items, None if known else size)


def _put(change: ItemChange, items: CatalogVersion, size: int | None) -> dict[str, Any]:
    record = change.record
    names = items.log.schema.names
    body: dict[str, Any] = {
        "item_id": record.item_id,
        "title": record.title,
        "categories": record.categories,
        "attributes": {name: record.attributes.get(name) for name in names},
    }
    if size is not None and change.vector is not None:
        body["embedding"] = change.vector[:size].tolist()
    return body


def _same(one: ItemRecord, other: ItemRecord, items: CatalogVersion) -> bool:
    """Returns True if both records agree in every field that the catalogue has."""
    names = items.log.schema.names
    return (one.title, list(one.categories)) == (other.title, list(other.categories)) and all(
        one.attributes.get(name) == other.attributes.get(name) for name in names
    )


def _embedding_size(old: LiveItems, new: LiveItems) -> int | None:
    """Returns the length of the embeddings that both builds were given; None if they differ."""
    sizes = [items.own_embedding_size() for items in (old, new)]
    return sizes[0] if sizes[0] == sizes[1] else None
