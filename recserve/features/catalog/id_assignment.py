"""Assigns semantic ids to vectors that were added after the quantiser was fitted.

The frozen quantiser gives the codes. The disambiguation level separates items with equal codes. An
id is chosen in this order:

1. The item's present id, if the new vector has the same codes.
2. The first free id with these codes. An id is free if no item or only a hidden item has it.
3. A free id with other codes: another last code, then another code of one more level, and so on.
   Within each of these, the id that is nearest to the vector comes first.

An item is never left without an id while the catalogue has a free one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from recserve.features.catalog.catalog_version import CatalogVersion
from recserve.features.vectors.quantizer import Quantizer
from recserve.features.vectors.semantic_ids import SemanticIdIndex


class IdAssigner:
    """Assigns semantic ids in the catalogue of one bundle.

    Attributes:
        index: Semantic ids of the bundle.
        quantizer: Quantiser of the bundle.
        ids_per_tuple: Number of ids per code tuple, which is the size of the disambiguation level.
    """

    def __init__(self, index: SemanticIdIndex, quantizer: Quantizer) -> None:
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
        self, version: CatalogVersion, vectors: np.ndarray, rows: Sequence[int]
    ) -> list[np.ndarray | None]:
        """Returns semantic ids that are distinct and free in a version.

        Args:
            version: Version of the catalogue.
            vectors: [n, F] item vectors.
            rows: [n] row of each item in this version, -1 for a new item.

        Returns:
            n semantic ids [L] uint16, None where every semantic id of the catalogue is taken.
        """
        if not len(vectors):
            return []
        taken: set[bytes] = set()
        full: set[bytes] = set()  # codes without a free id; similar vectors look at the same ones
        # Equal vectors share a search: an id that one of them found taken stays taken.
        searches: dict[bytes, Iterator[np.ndarray]] = {}
        assigned: list[np.ndarray | None] = []
        encoded = self.quantizer.encode(vectors)
        sharing = self.index.decode(encoded)
        for number, (codes, vector, row) in enumerate(zip(encoded, vectors, rows, strict=True)):
            found = self._own(version, codes, row, taken)
            if found is None:
                name = vector.tobytes()
                if name not in searches:
                    first = self._free(version, codes, sharing[number], taken, full)
                    searches[name] = chain(first, self._near(version, codes, vector, taken, full))
                found = next(searches[name], None)
            if found is not None:
                taken.add(found.tobytes())
            assigned.append(found)
        return assigned

    def is_far(self, codes: np.ndarray, vector: np.ndarray) -> bool:
        """Whether an id differs from a vector's [F] own codes in more than their last level."""
        own = self.quantizer.encode(vector[None])[0]
        return not np.array_equal(own[:-1], codes[: own.size - 1])

    def _own(
        self, version: CatalogVersion, codes: np.ndarray, row: int, taken: set[bytes]
    ) -> np.ndarray | None:
        """Returns the item's present id if the new vector has the same codes."""
        if row < 0:
            return None
        own = np.ascontiguousarray(version.codes[row], np.uint16)
        name = own.tobytes()
        if name in taken or not np.array_equal(own[: codes.size], codes):
            return None
        owner = version.owners.get(name)
        mine = row if owner < 0 else owner
        return own if mine == row or version.is_gone(mine) else None

    def _free(
        self,
        version: CatalogVersion,
        codes: np.ndarray,
        rows: np.ndarray,
        taken: set[bytes],
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
            if name not in taken and (owner < 0 or version.is_gone(owner)):
                yield np.frombuffer(name, np.uint16)
        full.add(stem)

    def _near(
        self,
        version: CatalogVersion,
        codes: np.ndarray,
        vector: np.ndarray,
        taken: set[bytes],
        full: set[bytes],
    ) -> Iterator[np.ndarray]:
        """Yields the free ids with other codes, in the order of the module's docstring."""
        for level in reversed(range(len(codes))):
            others = self._varied(codes, level, vector)
            others = others[others[:, level] != codes[level]]
            for batch in self._completed(others, level + 1, vector):
                stems = batch.astype(np.uint16)
                batch = batch[[stem.tobytes() not in full for stem in stems]]
                if not len(batch):
                    continue
                sharing = self.index.decode(batch)
                for number, near in enumerate(batch):
                    yield from self._free(version, near, sharing[number], taken, full)

    def _completed(
        self, prefixes: np.ndarray, level: int, vector: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Yields batches [n, L] of all tuples with one of the prefixes [m, L] before `level`."""
        if level == prefixes.shape[1]:
            yield prefixes
            return
        for prefix in prefixes:
            yield from self._completed(self._varied(prefix, level, vector), level + 1, vector)

    def _varied(self, codes: np.ndarray, level: int, vector: np.ndarray) -> np.ndarray:
        """Returns [C, L] tuples with every code at `level`, nearest to the vector first."""
        every = np.repeat(codes[None], self.quantizer.codebook_sizes[level], axis=0)
        every[:, level] = np.arange(len(every))
        distances = np.square(self.quantizer.decode(every) - vector).sum(1)
        return np.asarray(every[np.argsort(distances, kind="stable")])
