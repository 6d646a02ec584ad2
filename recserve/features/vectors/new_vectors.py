"""Vectors for items that came after the build, comparable with those of the catalogue.

As in building: text beside collaborative, of unit length. A new item has no events, so the second
part is what the most similar items by content have on average, or zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from recserve.features.catalog.catalog import Catalog
from recserve.features.catalog.item_records import ItemRecord, RecordTable
from recserve.features.tables.items import ItemTable
from recserve.features.vectors.text_encoder import TextEncoder, unit

NEAREST = 10


@dataclass(frozen=True)
class NewVectors:
    """How vectors of new items are made.

    encoder: of the build, None where the vectors were the user's own. content_dim: leading
    columns of a vector that tell the content; the rest is collaborative. raw: vectors are the
    user's own, of any length.
    """

    catalog: Catalog
    encoder: TextEncoder | None
    content_dim: int
    raw: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths that an item's own embedding may have."""
        whole = int(self.catalog.vectors.shape[1])
        return (whole,) if self.content_dim in (0, whole) else (whole, self.content_dim)

    def of_text(self, records: Sequence[ItemRecord]) -> np.ndarray | None:
        """[n, content_dim] from the items' words; zero without a known one; None: no encoder."""
        if self.encoder is None:
            return None
        table = RecordTable.of(records, self.catalog.items.attributes.schema)
        names = [str(place) for place in range(len(records))]
        titles = [record.title for record in records]
        attributes = table.attributes if table.attributes.num_columns else pa.table({})
        return self.encoder.encode(ItemTable(names, titles, table.categories, attributes))

    def of_content(self, content: np.ndarray) -> np.ndarray:
        """[n, F] of unit length from content [n, content_dim], as the catalogue's vectors are."""
        known = self.catalog.vectors
        vectors = np.zeros((len(content), known.shape[1]), np.float32)
        content = unit(content.astype(np.float32))
        vectors[:, : self.content_dim] = content
        if self.content_dim < known.shape[1]:
            similar = content @ known[:, : self.content_dim].T / self._lengths
            count = min(NEAREST, len(known))
            nearest = np.argpartition(-similar, count - 1, axis=1)[:, :count]
            weights = np.take_along_axis(similar, nearest, axis=1).clip(min=0)
            weights /= np.maximum(weights.sum(1, keepdims=True), 1e-6) * self._lengths[nearest]
            parts = known[nearest][:, :, self.content_dim :]
            vectors[:, self.content_dim :] = np.einsum("nk,nkf->nf", weights, parts)
        return unit(vectors)

    def of_categories(
        self, categories: Sequence[str], rows_of: Callable[[str], np.ndarray]
    ) -> np.ndarray:
        """[F] mean vector of the items of the deepest path that has any; zero if none has.

        rows_of: the rows of a category path.
        """
        for path in sorted(categories, key=lambda path: -path.count(">")):
            rows = rows_of(path)
            if rows.size:
                return np.asarray(unit(self.catalog.vectors[rows].mean(0, keepdims=True))[0])
        return np.zeros(self.catalog.vectors.shape[1], np.float32)

    @cached_property
    def _lengths(self) -> np.ndarray:
        """[I] length of the content part of each vector of the catalogue."""
        lengths = np.linalg.norm(self.catalog.vectors[:, : self.content_dim], axis=1)
        return np.where(lengths > 0, lengths, 1)
