"""The vector and the semantic id of an item that is added to a live catalogue.

Both are comparable with those of the bundle: the text encoder and the quantiser are the bundle's
own, fitted before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from recserve.features.catalog.catalog import Catalog
from recserve.features.catalog.item_records import ItemRecord, record_table
from recserve.features.catalog.semantic_ids import SemanticIds
from recserve.features.catalog.versions import CatalogVersion
from recserve.features.vectors.quantizer import Quantizer
from recserve.features.vectors.text_encoder import TextEncoder, unit

NEAREST = 10


@dataclass(frozen=True)
class NewVectors:
    """Makes vectors of new items.

    As in a build, a vector of unit length is a text part followed by a collaborative part. A new
    item has no events. Its collaborative part is the average of the items with the most similar
    content, or zero.

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
        return self.encoder.encode(record_table(records, self.catalog.items.attributes.schema))

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


class NewId(NamedTuple):
    """A semantic id for a new item or a new vector.

    Attributes:
        codes: [L] uint16, the semantic id.
        is_far: True if it differs from the vector's own codes in more than their last level.
    """

    codes: np.ndarray
    is_far: bool


class IdAssigner:
    """Assigns semantic ids in the catalogue of one bundle.

    The frozen quantiser gives the codes. The disambiguation level separates items with equal codes.
    An id is chosen in this order:

    1. The item's present id, if the new vector has the same codes.
    2. The first free id with these codes. An id is free if no item or only a hidden item has it.
    3. A free id with other codes: another last code, then another code of one more level, and so
       on. Within each of these, the id that is nearest to the vector comes first.

    An item is never left without an id while the catalogue has a free one.

    Attributes:
        index: Semantic ids of the bundle.
        quantizer: Quantiser of the bundle.
        ids_per_tuple: Number of ids per code tuple, which is the size of the disambiguation level.
    """

    def __init__(self, index: SemanticIds, quantizer: Quantizer) -> None:
        """Raises ValueError if the index was not built with this quantiser."""
        self.index = index
        self.quantizer = quantizer
        quantised = index.codebook_sizes[: -1 if index.has_disambiguation else None]
        if quantised != quantizer.codebook_sizes:
            raise ValueError(
                f"the catalogue has codebooks of {quantised}, "
                f"the quantiser of {quantizer.codebook_sizes}"
            )
        self.ids_per_tuple = index.codebook_sizes[-1] if index.has_disambiguation else 1

    def assign(
        self,
        version: CatalogVersion,
        vectors: np.ndarray,
        rows: Sequence[int],
        returning: Iterable[int] = (),
    ) -> list[NewId | None]:
        """Returns semantic ids that are distinct and free in a version.

        Args:
            version: Version of the catalogue.
            vectors: [n, F] item vectors.
            rows: [n] row of each item in this version, -1 for a new item.
            returning: Rows of hidden items that are put at the same time and keep their ids.

        Returns:
            n semantic ids, None where every semantic id of the catalogue is taken.
        """
        if not len(vectors):
            return []
        used = {np.ascontiguousarray(version.codes[row], np.uint16).tobytes() for row in returning}
        full: set[bytes] = set()  # codes without a free id; similar vectors look at the same ones
        # Equal vectors share a search: an id that one of them finds taken stays taken.
        searches: dict[bytes, Iterator[np.ndarray]] = {}
        ids: list[NewId | None] = []
        encoded = self.quantizer.encode(vectors)
        sharing = self.index.decode(encoded)
        for number, (codes, vector, row) in enumerate(zip(encoded, vectors, rows, strict=True)):
            semantic_id = self._present_id(version, codes, row, used)
            if semantic_id is None:
                name = vector.tobytes()
                if name not in searches:
                    first = self._free_ids(version, codes, sharing[number], used, full)
                    others = self._free_ids_nearby(version, codes, vector, used, full)
                    searches[name] = chain(first, others)
                semantic_id = next(searches[name], None)
            if semantic_id is None:
                ids.append(None)
                continue
            used.add(semantic_id.tobytes())
            last = codes.size - 1
            ids.append(NewId(semantic_id, not np.array_equal(codes[:last], semantic_id[:last])))
        return ids

    def _present_id(
        self, version: CatalogVersion, codes: np.ndarray, row: int, used: set[bytes]
    ) -> np.ndarray | None:
        """Returns the item's present id if the new vector has the same codes."""
        if row < 0:
            return None
        own = np.ascontiguousarray(version.codes[row], np.uint16)
        name = own.tobytes()
        if name in used or not np.array_equal(own[: codes.size], codes):
            return None
        owner = version.owners.get(name)
        mine = row if owner < 0 else owner
        return own if mine == row or version.is_removed(mine) else None

    def _free_ids(
        self,
        version: CatalogVersion,
        codes: np.ndarray,
        rows: np.ndarray,
        used: set[bytes],
        full: set[bytes],
    ) -> Iterator[np.ndarray]:
        """Yields the free ids with these codes, which the caller takes, and adds the codes to
        `full` after the last one. `rows` are the bundle's items with them.
        """
        stem = codes.astype(np.uint16).tobytes()
        if stem in full:
            return
        owners = {self.index.codes[row].tobytes(): row for row in rows.tolist()}
        for code in range(self.ids_per_tuple):
            # The id's bytes as uint16: the quantiser's codes, then the disambiguation code.
            last = code.to_bytes(2, sys.byteorder) if self.index.has_disambiguation else b""
            name = stem + last
            owner = version.owners.get(name)
            owner = owners.get(name, -1) if owner < 0 else owner
            if name not in used and (owner < 0 or version.is_removed(owner)):
                yield np.frombuffer(name, np.uint16)
        full.add(stem)

    def _free_ids_nearby(
        self,
        version: CatalogVersion,
        codes: np.ndarray,
        vector: np.ndarray,
        used: set[bytes],
        full: set[bytes],
    ) -> Iterator[np.ndarray]:
        """Yields the free ids with other codes, in the order of the class's docstring."""
        for level in reversed(range(len(codes))):
            others = self._vary(codes, level, vector)
            others = others[others[:, level] != codes[level]]
            for batch in self._complete(others, level + 1, vector):
                stems = batch.astype(np.uint16)
                batch = batch[[stem.tobytes() not in full for stem in stems]]
                if not len(batch):
                    continue
                sharing = self.index.decode(batch)
                for number, near in enumerate(batch):
                    yield from self._free_ids(version, near, sharing[number], used, full)

    def _complete(
        self, prefixes: np.ndarray, level: int, vector: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Yields batches [n, L] of all tuples with one of the prefixes [m, L] before `level`."""
        if level == prefixes.shape[1]:
            yield prefixes
            return
        for prefix in prefixes:
            yield from self._complete(self._vary(prefix, level, vector), level + 1, vector)

    def _vary(self, codes: np.ndarray, level: int, vector: np.ndarray) -> np.ndarray:
        """Returns [C, L] tuples with every code at `level`, nearest to the vector first."""
        every = np.repeat(codes[None], self.quantizer.codebook_sizes[level], axis=0)
        every[:, level] = np.arange(len(every))
        distances = np.square(self.quantizer.decode(every) - vector).sum(1)
        return np.asarray(every[np.argsort(distances, kind="stable")])
