"""Items of a PUT request become changes of the catalogue."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from recserve.bounds import MAX_TIME_US, MIN_TIME_US, TIMES, format_time
from recserve.features.catalog.filters import CATEGORIES
from recserve.features.catalog.item_records import ItemRecord, check_attributes
from recserve.features.catalog.new_items import IdAssigner, NewVectors
from recserve.features.catalog.versions import ItemChange
from recserve.features.tables.items import AVAILABLE_FROM, EXPIRES_AT
from recserve.features.vectors.text_encoder import unit
from recserve.schemas.items import ItemInput, Rejection
from recserve.schemas.validation import to_message
from recserve.service.history import EPOCH, MICROSECOND
from recserve.service.snapshot import Snapshot

ITEM_FIELDS = frozenset(ItemInput.__struct_fields__)


@dataclass
class _PendingChange:
    """A change that does not have its vector or its semantic id yet.

    Attributes:
        index: Position of the item in the request.
        row: Current row of the item; -1 for a new item.
        record: Title, categories, attributes and times after the change.
        vector: [F] the item's new vector; None if the vector does not change.
        codes: [L] its semantic id; None until it is assigned.
    """

    index: int
    row: int
    record: ItemRecord
    vector: np.ndarray | None
    codes: np.ndarray | None = None


@dataclass(frozen=True)
class MadeVector:
    """A vector that was made for a new item without an embedding.

    Attributes:
        record: The item's record, from which it was made.
        vector: [F] the vector.
        reason: Why it is approximate; empty if it is not.
    """

    record: ItemRecord
    vector: np.ndarray
    reason: str


class PutRequest:
    """Turns the items of a PUT request into changes; each item is validated on its own.

    Attributes:
        snapshot: The catalogue version that the changes apply to.
        tools: Makes vectors for items that come without an embedding, and assigns semantic ids.
            None: no item gets another id, and there are no new items.
        now_us: Time of the request in microseconds since 1970.
        added_at: Times of addition of items that another catalogue had before, by id.
        rejected: Items that the request cannot change, with the reason.
        degraded: Items that got an approximate vector, with the reason.
        made: Vectors of new items, by id. They stay when the request is read again.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        tools: tuple[NewVectors, IdAssigner] | None,
        now_us: int,
        added_at: Mapping[str, int | None],
        made: dict[str, MadeVector],
    ) -> None:
        self.snapshot = snapshot
        self.tools = tools
        self.now_us = now_us
        self.added_at = added_at
        self.made = made
        self.rejected: list[Rejection] = []
        self.degraded: list[Rejection] = []
        self._changes: dict[str, _PendingChange] = {}

    def read(self, items: Sequence[dict[str, Any]]) -> list[ItemChange]:
        """Returns the changes of all valid items, in request order; the others are `rejected`."""
        bodies: dict[int, ItemInput] = {}
        for index, raw in enumerate(items):
            try:
                # The fields that the schema names; all other fields are attributes.
                bodies[index] = to_message(
                    {name: value for name, value in raw.items() if name in ITEM_FIELDS}, ItemInput
                )
            except ValueError as error:
                self._reject(index, str(error))
        rows = self.snapshot.items.rows_by_key([body.item_id for body in bodies.values()])
        for (index, body), row in zip(bodies.items(), rows, strict=True):
            try:
                change = self._check_item(index, body, items[index], row)
            except ValueError as error:
                self._reject(index, str(error))
            else:
                self._changes[body.item_id] = change
        self._make_vectors()
        self._assign_ids()
        return [ItemChange(c.record, c.vector, c.codes) for c in self._changes.values()]

    def _check_item(
        self, index: int, body: ItemInput, raw: dict[str, Any], row: int
    ) -> _PendingChange:
        """Raises ValueError with a message for the client."""
        if body.item_id in self._changes:
            raise ValueError(f"item {body.item_id[:80]!r} occurs twice in this request")
        items = self.snapshot.items
        if self.tools is None and (row < 0 or body.embedding is not None):
            name = "item_id" if row < 0 else "embedding"
            raise ValueError(
                f"{name}: the bundle was imported and cannot give an item a semantic id; only "
                "items of the import can change. Import again with this item and its id"
            )
        items.check_key(body.item_id, row)
        new = ItemRecord(
            body.item_id, "", [], {}, added_at=self.added_at.get(body.item_id, self.now_us)
        )
        record = items.record(row) if row >= 0 else new
        others = {name: value for name, value in raw.items() if name not in ITEM_FIELDS}
        given = {**others, **body.attributes}
        updated = check_attributes(given, items.log.schema)
        retained = {k: v for k, v in record.attributes.items() if given.get(k, v) is not None}
        record = ItemRecord(
            body.item_id,
            record.title if body.title is UNSET else body.title or "",
            record.categories if body.categories is UNSET else body.categories or [],
            {**retained, **updated},
            _time_us(AVAILABLE_FROM, body.available_from, record.available_from),
            _time_us(EXPIRES_AT, body.expires_at, record.expires_at),
            record.added_at,
        )
        first, last = record.available_from, record.expires_at
        if first is not None and last is not None and first >= last:
            raise ValueError(
                f"{EXPIRES_AT}: expected a time after {AVAILABLE_FROM}, which is "
                f"{format_time(first)}, got {format_time(last)}"
            )
        return _PendingChange(index, row, record, self._check_embedding(body.embedding, row))

    def _check_embedding(self, embedding: Sequence[float] | None, row: int) -> np.ndarray | None:
        """Returns the [F] vector of an embedding; None if there is none or it does not change."""
        if embedding is None or self.tools is None:
            return None
        vectors = self.tools[0]
        given = np.array(embedding, dtype=np.float32)
        sizes = vectors.sizes
        if given.size not in sizes:
            wanted = " or ".join(map(str, sizes))
            raise ValueError(f"embedding: expected {wanted} numbers, got {given.size}")
        if not np.isfinite(given).all():
            raise ValueError("embedding: holds a number that is not finite in single precision")
        with np.errstate(over="ignore"):
            too_long = vectors.raw and not np.isfinite(np.linalg.norm(given))
        if too_long:  # other embeddings are scaled to length 1
            raise ValueError("embedding: its length is not finite in single precision")
        if given.size < sizes[0]:
            vector = vectors.of_content(given[None])[0]
        else:
            vector = given if vectors.raw else unit(given[None])[0]
        if row >= 0 and np.array_equal(self.snapshot.items.vectors[row], vector):
            return None
        return np.asarray(vector)

    def _make_vectors(self) -> None:
        """Makes the vectors of new items that came without an embedding.

        They come from an item's text, or else from other items of the same categories. A hidden
        item whose semantic id has been reused keeps its vector and gets a new id.
        """
        items, new = self.snapshot.items, list[_PendingChange]()
        for change in self._changes.values():
            if change.vector is None and change.row < 0:
                earlier = self.made.get(change.record.item_id)
                if earlier is not None and earlier.record == change.record:
                    self._take_vector(change, earlier)
                else:
                    new.append(change)
            elif change.vector is None and items.has_lost_id(change.row):
                change.vector = np.asarray(items.vectors[change.row])
        if not new or self.tools is None:
            return
        makes = self.tools[0]
        content = makes.of_text([change.record for change in new])
        made = None if content is None else makes.of_content(content)
        for number, change in enumerate(new):
            if made is not None and content is not None and content[number].any():
                vector, reason = made[number], ""
            else:
                vector = makes.of_categories(change.record.categories, self._rows_of_path)
                reason = "no embedding and no known word; its vector comes from its categories only"
                if not vector.any():
                    reason = "no embedding, known word or category; its position is arbitrary"
            self._take_vector(change, MadeVector(change.record, vector, reason))

    def _take_vector(self, change: _PendingChange, made: MadeVector) -> None:
        """Gives a made vector to a new item."""
        self.made[change.record.item_id] = made
        change.vector = made.vector
        if made.reason:
            self.degraded.append(Rejection(index=change.index, reason=made.reason))

    def _assign_ids(self) -> None:
        """Gives a semantic id to each item with a new vector, or rejects the item."""
        moving = [change for change in self._changes.values() if change.vector is not None]
        if not moving or self.tools is None:
            return
        vectors = np.stack([change.vector for change in moving if change.vector is not None])
        rows = [change.row for change in moving]
        kept = [change.row for change in self._changes.values() if change.vector is None]
        ids = self.tools[1].assign(self.snapshot.items, vectors, rows, kept)
        for change, new_id in zip(moving, ids, strict=True):
            if new_id is None:
                self._reject(change.index, "all semantic ids of the catalogue are taken")
                del self._changes[change.record.item_id]
                continue
            change.codes = new_id.codes
            if new_id.is_far:
                reason = "the semantic ids near this item are taken; it got one farther away"
                self.degraded.append(Rejection(index=change.index, reason=reason))

    def _rows_of_path(self, path: str) -> np.ndarray:
        return np.flatnonzero(self.snapshot.filters.evaluate({"eq": [CATEGORIES, path]}))

    def _reject(self, index: int, reason: str) -> None:
        self.rejected.append(Rejection(index=index, reason=reason))


def _time_us(
    name: str, given: datetime.datetime | None | UnsetType, before: int | None
) -> int | None:
    """Returns a time of an item in microseconds since 1970, or None. Raises ValueError."""
    if given is UNSET or given is None:
        return before if given is UNSET else None
    time_us = (given - EPOCH) // MICROSECOND
    if not MIN_TIME_US <= time_us < MAX_TIME_US:
        raise ValueError(f"{name}: expected {TIMES}, or null for no time, got {given.isoformat()}")
    return time_us
