"""Makes vectors of new items that are comparable with the catalogue's vectors.

As in a build, a vector of unit length is a text part followed by a collaborative part. A new item
has no events. Its collaborative part is the average of the items with the most similar content, or
zero.
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
    """Makes vectors of new items.

    Attributes:
        catalog: The bundle's catalogue of I items.
        encoder: Text encoder of the build, or None if the user supplied the vectors.
        content_dim: Number of leading content columns of a vector. The rest is collaborative.
        raw: True if item vectors are the user's own and are not normalised.
    """

    catalog: Catalog
    encoder: TextEncoder | None
    content_dim: int
    raw: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that a supplied item embedding may have."""
        whole = int(self.catalog.vectors.shape[1])
        return (whole,) if self.content_dim in (0, whole) else (whole, self.content_dim)

    def of_text(self, records: Sequence[ItemRecord]) -> np.ndarray | None:
        """Returns [n, content_dim] text vectors, or None without an encoder.

        An item without a known term gets zeros.
        """
        if self.encoder is None:
            return None
        table = RecordTable.of(records, self.catalog.items.attributes.schema)
        names = [str(place) for place in range(len(records))]
        titles = [record.title for record in records]
        attributes = table.attributes if table.attributes.num_columns else pa.table({})
        return self.encoder.encode(ItemTable(names, titles, table.categories, attributes))

    def of_content(self, content: np.ndarray) -> np.ndarray:
        """Completes content [n, content_dim] to item vectors [n, F] of unit length."""
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
        """Returns the [F] mean vector of the items in the deepest non-empty category, or zeros.

        Args:
            categories: Category paths of the item.
            rows_of: Returns the rows of a category path.
        """
        for path in sorted(categories, key=lambda path: -path.count(">")):
            rows = rows_of(path)
            if rows.size:
                return np.asarray(unit(self.catalog.vectors[rows].mean(0, keepdims=True))[0])
        return np.zeros(self.catalog.vectors.shape[1], np.float32)

    @cached_property
    def _lengths(self) -> np.ndarray:
        """[I] length of the content part of each catalogue vector, 1 for a zero part."""
        lengths = np.linalg.norm(self.catalog.vectors[:, : self.content_dim], axis=1)
        return np.where(lengths > 0, lengths, 1)
