"""Semantic ids for vectors that came after the quantiser was fitted.

The frozen quantiser gives the codes. Where items share them, the disambiguation level tells them
apart: an item keeps the code it has, else it takes the first that is free (nobody's, or a hidden
item's). Where all are taken, the last quantised code moves to the next nearest that has room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recserve.features.catalog_version import CatalogVersion
from recserve.features.quantizer import Quantizer
from recserve.features.semantic_ids import SemanticIdIndex


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
        for codes, vector, row in zip(self.quantizer.encode(vectors), vectors, rows, strict=True):
            found = self._own(version, codes, row, taken)
            if found is None:
                found = self._free(version, codes[None], taken)
            if found is None:
                found = self._free(version, self._nearby(codes, vector), taken)
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
        self, version: CatalogVersion, prefixes: np.ndarray, taken: set[bytes]
    ) -> np.ndarray | None:
        """The first free id under the first prefix [n, l] that has one."""
        found = self.index.decode(prefixes)
        for number, prefix in enumerate(prefixes):
            rows = found[number]
            owners = {self.index.codes[row].tobytes(): row for row in rows.tolist()}
            for code in range(self.room):
                last = [code] if self.index.has_disambiguation else []
                full = np.append(prefix, last).astype(np.uint16)
                name = full.tobytes()
                owner = version.owners.get(name)
                owner = owners.get(name, -1) if owner < 0 else owner
                if name not in taken and (owner < 0 or version.is_gone(owner)):
                    return full
        return None

    def _nearby(self, codes: np.ndarray, vector: np.ndarray) -> np.ndarray:
        """[C, l] the codes with each other last code, the nearest to the vector first."""
        size = self.quantizer.codebook_sizes[-1]
        others = np.repeat(codes[None], size, axis=0)
        others[:, -1] = np.arange(size)
        distances = np.square(self.quantizer.decode(others) - vector).sum(1)
        return np.ascontiguousarray(others[np.argsort(distances, kind="stable")])
