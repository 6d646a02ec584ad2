"""Semantic ids for vectors that came after the quantiser was fitted.

The frozen quantiser gives the codes. Where items share them, the disambiguation level tells them
apart: an item keeps the code it has, else it takes the first that is free (nobody's, or a hidden
item's). Where all are taken, the last quantised code moves to the next nearest that has room.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from recserve.features.catalog.catalog_version import CatalogVersion
from recserve.features.vectors.quantizer import Quantizer
from recserve.features.vectors.semantic_ids import SemanticIdIndex


class IdAssigner:
    """Assigns semantic ids in the catalogue of one bundle."""

    def __init__(self, index: SemanticIdIndex, quantizer: Quantizer) -> None:
        """Raises ValueError if the quantiser is not the one that the index was made with."""
        self.index = index
        self.quantizer = quantizer
        quantised = index.codebook_sizes[: -1 if index.has_disambiguation else None]
        if quantised != quantizer.codebook_sizes:
            raise ValueError(
                f"the catalogue has codebooks of {quantised}, "
                f"the quantiser of {quantizer.codebook_sizes}"
            )
        self.room = index.codebook_sizes[-1] if index.has_disambiguation else 1

    def assign(
        self, version: CatalogVersion, vectors: np.ndarray, rows: Sequence[int]
    ) -> list[np.ndarray | None]:
        """[L] uint16 for each vector, None where no id near it is free.

        vectors [n, F]. rows [n]: the row that the item has in this version, -1: none. The ids are
        free in this version and distinct.
        """
        if not len(vectors):
            return []
        taken: set[bytes] = set()
        assigned: list[np.ndarray | None] = []
        encoded = self.quantizer.encode(vectors)
        sharing = self.index.decode(encoded)
        for number, (codes, vector, row) in enumerate(zip(encoded, vectors, rows, strict=True)):
            found = self._own(version, codes, row, taken)
            if found is None:
                found = self._free(version, codes, sharing[number], taken)
            if found is None:
                found = self._near(version, codes, vector, taken)
            if found is not None:
                taken.add(found.tobytes())
            assigned.append(found)
        return assigned

    def _own(
        self, version: CatalogVersion, codes: np.ndarray, row: int, taken: set[bytes]
    ) -> np.ndarray | None:
        """The id that the item has, where its new vector leads to the same codes."""
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
        self, version: CatalogVersion, codes: np.ndarray, rows: np.ndarray, taken: set[bytes]
    ) -> np.ndarray | None:
        """The first free id of these codes. rows: of the bundle's items that have them."""
        owners = {self.index.codes[row].tobytes(): row for row in rows.tolist()}
        stem = codes.astype(np.uint16).tobytes()
        for code in range(self.room):
            last = code.to_bytes(2, sys.byteorder) if self.index.has_disambiguation else b""
            name = stem + last
            owner = version.owners.get(name)
            owner = owners.get(name, -1) if owner < 0 else owner
            if name not in taken and (owner < 0 or version.is_gone(owner)):
                return np.frombuffer(name, np.uint16)
        return None

    def _near(
        self, version: CatalogVersion, codes: np.ndarray, vector: np.ndarray, taken: set[bytes]
    ) -> np.ndarray | None:
        """A free id of other last codes, the nearest to the vector first."""
        size = self.quantizer.codebook_sizes[-1]
        others = np.repeat(codes[None], size, axis=0)
        others[:, -1] = np.arange(size)
        distances = np.square(self.quantizer.decode(others) - vector).sum(1)
        others = others[np.argsort(distances, kind="stable")]
        sharing = self.index.decode(others)
        for number, near in enumerate(others):
            found = self._free(version, near, sharing[number], taken)
            if found is not None:
                return found
        return None
