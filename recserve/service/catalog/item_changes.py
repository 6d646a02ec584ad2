"""Turns the items of a PUT request into catalogue changes with vectors and semantic ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recserve.features.catalog.filters import CATEGORIES
from recserve.features.catalog.id_assignment import IdAssigner
from recserve.features.catalog.item_records import ItemRecord, checked_attributes
from recserve.features.catalog.live_catalog import ItemChange
from recserve.features.vectors.new_vectors import NewVectors
from recserve.features.vectors.text_encoder import unit
from recserve.schemas.items import ItemInput, Rejection
from recserve.schemas.validation import converted
from recserve.service.catalog.snapshot import Snapshot

FIELDS = frozenset(ItemInput.__struct_fields__)


@dataclass
class _Draft:
    """A change that does not have its vector or its semantic id yet.

    Attributes:
        index: Position of the item in the request.
        row: Current row of the item; -1 for a new item.
        record: Title, categories and attributes after the change.
        vector: [F] the item's new vector; None if the vector does not change.
        change: The finished change; None until the item has a semantic id.
    """

    index: int
    row: int
    record: ItemRecord
    vector: np.ndarray | None
    change: ItemChange | None = None


class ItemChanges:
    """The items of one request; each is validated on its own.

    Attributes:
        snapshot: The catalogue version that the changes apply to.
        vectors: Makes vectors for items that come without an embedding.
        assigner: Assigns semantic ids.
        rejected: Items that the request cannot change, with the reason.
        degraded: Items that got an approximate vector, with the reason.
    """

    def __init__(self, snapshot: Snapshot, vectors: NewVectors, assigner: IdAssigner) -> None:
        self.snapshot = snapshot
        self.vectors = vectors
        self.assigner = assigner
        self.rejected: list[Rejection] = []
        self.degraded: list[Rejection] = []
        self._drafts: dict[str, _Draft] = {}

    def take(self, items: Sequence[dict[str, Any]]) -> None:
        """Validates the items of a request; an invalid item goes to `rejected`."""
        bodies: dict[int, ItemInput] = {}
        for index, raw in enumerate(items):
            try:
                bodies[index] = _converted(raw)
            except ValueError as error:
                self._reject(index, str(error))
        rows = self.snapshot.items.rows_by_key([body.item_id for body in bodies.values()])
        for (index, body), row in zip(bodies.items(), rows, strict=True):
            try:
                draft = self._draft(index, body, items[index], row)
            except ValueError as error:
                self._reject(index, str(error))
            else:
                self._drafts[body.item_id] = draft

    def finish(self) -> list[ItemChange]:
        """Assigns vectors and semantic ids.

        Returns:
            The changes of all valid items, in request order. An item for which the catalogue has no
            semantic id left goes to `rejected`.
        """
        drafts = list(self._drafts.values())
        self._fill_vectors([d for d in drafts if d.vector is None and self._needs_vector(d)])
        moving = [d for d in drafts if d.vector is not None]
        wanted = [d.vector for d in moving if d.vector is not None]
        vectors = np.stack(wanted) if wanted else np.zeros((0, 0), np.float32)
        codes = self.assigner.assign(self.snapshot.items, vectors, [d.row for d in moving])
        for draft, vector, found in zip(moving, vectors, codes, strict=True):
            if found is None:
                self._reject(draft.index, "all semantic ids of the catalogue are taken")
                del self._drafts[draft.record.item_id]
                continue
            if self.assigner.is_far(found, vector):
                reason = "the semantic ids near this item are taken; it got one farther away"
                self.degraded.append(Rejection(index=draft.index, reason=reason))
            draft.change = ItemChange(draft.record, draft.vector, found)
        return [d.change or ItemChange(d.record) for d in self._drafts.values()]

    def _draft(self, index: int, body: ItemInput, raw: dict[str, Any], row: int) -> _Draft:
        """Raises ValueError with a message for the client."""
        if body.item_id in self._drafts:
            raise ValueError(f"item {body.item_id[:80]!r} occurs twice in this request")
        items = self.snapshot.items
        items.check_key(body.item_id, row)
        record = items.record(row) if row >= 0 else ItemRecord(body.item_id, "", [], {})
        others = {name: value for name, value in raw.items() if name not in FIELDS}
        given = {**others, **body.attributes}
        updated = checked_attributes(given, items.log.schema)
        retained = {k: v for k, v in record.attributes.items() if given.get(k, v) is not None}
        record = ItemRecord(
            body.item_id,
            record.title if body.title is None else body.title,
            record.categories if body.categories is None else body.categories,
            {**retained, **updated},
        )
        return _Draft(index, row, record, self._vector(body.embedding, row))

    def _vector(self, embedding: Sequence[float] | None, row: int) -> np.ndarray | None:
        """Returns the [F] vector of an embedding; None if there is none or it does not change."""
        if embedding is None:
            return None
        given = np.array(embedding, dtype=np.float32)
        sizes = self.vectors.sizes
        if given.size not in sizes:
            wanted = " or ".join(map(str, sizes))
            raise ValueError(f"embedding: expected {wanted} numbers, got {given.size}")
        if not np.isfinite(given).all():
            raise ValueError("embedding: holds a number that is not finite in single precision")
        with np.errstate(over="ignore"):
            too_long = self.vectors.raw and not np.isfinite(np.linalg.norm(given))
        if too_long:  # other embeddings are scaled to length 1
            raise ValueError("embedding: its length is not finite in single precision")
        if given.size < sizes[0]:
            vector = self.vectors.of_content(given[None])[0]
        else:
            vector = given if self.vectors.raw else unit(given[None])[0]
        if row >= 0 and np.array_equal(self.snapshot.items.vectors[row], vector):
            return None
        return np.asarray(vector)

    def _needs_vector(self, draft: _Draft) -> bool:
        """Returns True for new items, and for hidden items whose semantic id has been reused."""
        if draft.row < 0:
            return True
        if not self.snapshot.items.is_gone(draft.row) or self._owns_id(draft.row):
            return False
        draft.vector = np.asarray(self.snapshot.items.vectors[draft.row])
        return False

    def _owns_id(self, row: int) -> bool:
        name = np.ascontiguousarray(self.snapshot.items.codes[row], np.uint16).tobytes()
        return self.snapshot.items.owners.get(name) in (-1, row)

    def _fill_vectors(self, drafts: list[_Draft]) -> None:
        """Makes vectors from the items' text, or else from other items of the same categories."""
        if not drafts:
            return
        content = self.vectors.of_text([d.record for d in drafts])
        made = None if content is None else self.vectors.of_content(content)
        for number, draft in enumerate(drafts):
            if made is not None and content is not None and content[number].any():
                draft.vector = made[number]
                continue
            draft.vector = self.vectors.of_categories(draft.record.categories, self._rows_of_path)
            reason = "no embedding and no known word; its vector comes from its categories only"
            if not draft.vector.any():
                reason = "no embedding, known word or category; its position is arbitrary"
            self.degraded.append(Rejection(index=draft.index, reason=reason))

    def _rows_of_path(self, path: str) -> np.ndarray:
        return np.flatnonzero(self.snapshot.filters.evaluate({"eq": [CATEGORIES, path]}))

    def _reject(self, index: int, reason: str) -> None:
        self.rejected.append(Rejection(index=index, reason=reason))


def _converted(raw: dict[str, Any]) -> ItemInput:
    """Validates the fields that the schema names; all other fields are attributes."""
    return converted({k: v for k, v in raw.items() if k in FIELDS}, ItemInput)
