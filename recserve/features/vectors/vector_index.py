"""Finds nearest items by inner product, exactly for small catalogues, else by inverted lists.

`FaissIndex` is built from the items of a catalogue. `VersionIndex` follows a live catalogue.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import faiss
import numpy as np

from recserve.features.tables.arrays import GrowableArray, are_among
from recserve.features.vectors.faiss_gpu import FaissGpu, GpuLists
from recserve.features.vectors.faiss_threads import one_thread

FLAT_BELOW = 50_000
LISTS_SHARE = 16  # a search reads one in 16 inverted lists
TRAINED_PER_LIST = 64
ALL_LISTS_SHARE = 8  # a search for more than an eighth of the items reads all lists
VectorsOf = Callable[[np.ndarray], np.ndarray]  # rows [n] to unit vectors [n, E] float32


class FaissIndex:
    """A faiss index of unit vectors of item rows.

    The index is flat, and so exact, below 50,000 items. Above that it is an inverted file of about
    4 sqrt(I) lists. A search reads one list in 16. A search for more than an eighth of the
    catalogue reads all lists, so that a strict filter never runs out of items.

    Attributes:
        num_items: I, the number of vectors.
        dimensions: E, the size of a vector.
        flat_below: Number of items from which inverted lists are used.
        num_lists: Number of inverted lists, 0 for a flat index.
    """

    def __init__(
        self, vectors: np.ndarray, flat_below: int = FLAT_BELOW, rows: np.ndarray | None = None
    ) -> None:
        """Builds the index.

        Args:
            vectors: [I, E] float32 of length 1.
            flat_below: Number of items from which inverted lists are used.
            rows: [I] int64 item row of each vector, or None for 0 to I - 1.

        Raises:
            ValueError: If there is no vector.
        """
        if vectors.ndim != 2 or not vectors.shape[0]:
            raise ValueError(f"vectors are {vectors.shape}; expected [items >= 1, dimensions]")
        vectors = np.ascontiguousarray(vectors, np.float32)
        self.num_items: int = vectors.shape[0]
        self.dimensions: int = vectors.shape[1]
        self.flat_below = flat_below
        self.num_lists = 0
        flat: faiss.Index = faiss.IndexFlatIP(self.dimensions)
        if self.num_items >= flat_below:
            self.num_lists = max(1, round(4 * math.sqrt(self.num_items)))
            self._index: faiss.Index = faiss.IndexIVFFlat(
                flat, self.dimensions, self.num_lists, faiss.METRIC_INNER_PRODUCT
            )
            sample = np.random.default_rng(0).permutation(self.num_items)
            self._index.train(vectors[np.sort(sample[: TRAINED_PER_LIST * self.num_lists])])
            # `vectors` looks rows up.
            self._index.set_direct_map_type(faiss.DirectMap.Hashtable)  # type: ignore[attr-defined]
        else:
            self._index = faiss.IndexIDMap2(flat)
        self._index.add_with_ids(vectors, np.arange(self.num_items) if rows is None else rows)
        self._num_trained, self._num_added = self.num_items, 0

    def is_outgrown(self, num_removed: int, num_new: int) -> bool:
        """Whether to rebuild the index instead of editing so many removed and new rows.

        True if a flat index has become too large, or if most vectors were added after the lists
        were trained.
        """
        too_large = self.num_items - num_removed + num_new >= self.flat_below
        return too_large and (not self.num_lists or self._num_added + num_new > self._num_trained)

    def edit(self, removed_rows: np.ndarray, rows: np.ndarray, vectors: np.ndarray) -> FaissIndex:
        """Returns a copy with some rows removed and others added.

        The lists keep their centroids, so a million items take a quarter of a second.

        Args:
            removed_rows: [g] rows to remove.
            rows: [n] rows to add.
            vectors: [n, E] float32 unit vectors of the added rows.
        """
        new = copy.copy(self)
        new._index = faiss.clone_index(self._index)
        with one_thread():
            # Lists look each row up, a flat index looks at every row.
            select = faiss.IDSelectorArray if self.num_lists else faiss.IDSelectorBatch
            new._index.remove_ids(select(np.ascontiguousarray(removed_rows, np.int64)))
            new._index.add_with_ids(np.ascontiguousarray(vectors, np.float32), rows)
        new.num_items, new._num_added = new._index.ntotal, self._num_added + len(rows)
        return new

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Implements `VectorIndex.search` of core/request.py; row -1 pads if k exceeds I."""
        parameters = None
        if self.num_lists:
            parameters = faiss.SearchParametersIVF(nprobe=self.num_probed(k))  # type: ignore[call-arg]
        queries = np.ascontiguousarray(queries, np.float32)
        with one_thread():
            scores, rows = self._index.search(queries, k, params=parameters)
        return rows, scores

    def num_probed(self, k: int) -> int:
        """Returns how many inverted lists a search for k items reads."""
        everywhere = k * ALL_LISTS_SHARE > self.num_items
        return self.num_lists if everywhere else math.ceil(self.num_lists / LISTS_SHARE)

    def lists_on(self, gpu: FaissGpu, stream: int) -> GpuLists | None:
        """Copies the inverted lists to a device; None if the index is flat."""
        return gpu.lists(self._index, stream) if self.num_lists else None

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Implements `VectorIndex.vectors` of core/request.py."""
        with one_thread():
            found: np.ndarray = self._index.reconstruct_batch(np.ascontiguousarray(rows, np.int64))
        return found


class LaterRows:
    """Append-only rows and vectors after a base, shared by all versions."""

    def __init__(self, dimensions: int) -> None:
        self.rows = GrowableArray((), np.int64)
        self.vectors = GrowableArray((dimensions,), np.float32)

    def append(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        """Appends rows [n] and their vectors [n, E]."""
        self.rows.append(rows)
        self.vectors.append(vectors)


@dataclass(frozen=True)
class VersionIndex:
    """The immutable vector index of one version: a built base plus the rows that were added since.

    The rows of a version are in the base or among the later rows, which are searched exhaustively.
    Rows that were removed when the base was made may be in neither. A fold moves the later rows
    into a new base and leaves out removed rows. A row that returns after a fold is a later row
    again.

    Attributes:
        base: Built index.
        later: Later rows of all versions on this base.
        num_later: Number of later rows that belong to this version.
        left_out: [g] ascending removed rows of the version that are in neither part.
    """

    base: FaissIndex
    later: LaterRows
    num_later: int
    left_out: np.ndarray

    @staticmethod
    def on(base: FaissIndex, left_out: np.ndarray | None = None) -> VersionIndex:
        """Returns the index of a base that contains all rows except `left_out`."""
        none = np.zeros(0, np.int64)
        return VersionIndex(
            base, LaterRows(base.dimensions), 0, none if left_out is None else left_out
        )

    @property
    def num_items(self) -> int:
        """Number of vectors, including those of removed rows that are not left out."""
        return self.base.num_items + self.num_later

    @property
    def num_rows(self) -> int:
        """Number of item rows of the version."""
        return self.num_items + self.left_out.size

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Implements `VectorIndex.search` of core/request.py."""
        queries = np.ascontiguousarray(queries, np.float32)
        rows, scores = self.base.search(queries, k)
        if not self.num_later:
            return rows, scores
        vectors = self.later.vectors.view(self.num_later)
        count = min(k, self.num_later)
        with one_thread():
            more, places = faiss.knn(queries, vectors, count, faiss.METRIC_INNER_PRODUCT)
        rows = np.concatenate([rows, self.later.rows.view(self.num_later)[places]], axis=1)
        scores = np.concatenate([scores, more], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Implements `VectorIndex.vectors` of core/request.py."""
        if not self.num_later:
            return self.base.vectors(rows)
        later = self.later.rows.view(self.num_later)
        order = np.argsort(later)
        places = order[np.searchsorted(later, rows, sorter=order).clip(max=later.size - 1)]
        own = later[places] == rows
        found = np.empty((rows.size, self.base.dimensions), np.float32)
        found[own] = self.later.vectors.view(self.num_later)[places[own]]
        found[~own] = self.base.vectors(rows[~own])
        return found

    def base_rows(self) -> np.ndarray:
        """Returns the ascending rows that are in the base."""
        known, later = np.arange(self.num_rows), self.later.rows.view(self.num_later)
        return np.asarray(known[~are_among(known, np.union1d(self.left_out, later))])

    def later_rows(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows [n] and vectors [n, E] of the later rows from number `start` on."""
        stop = self.num_later
        return self.later.rows.view(stop)[start:], self.later.vectors.view(stop)[start:]

    def at(self, num_rows: int, removed_rows: np.ndarray, vectors_of: VectorsOf) -> VersionIndex:
        """Returns the index of the next version, with the rows that this version lacks.

        The cost grows with these rows only, apart from a search for `left_out` in `removed_rows`.

        Args:
            num_rows: Item rows of the next version.
            removed_rows: [g] ascending rows that the next version does not recommend.
            vectors_of: Returns unit vectors of rows.
        """
        assert self.num_later == self.later.rows.count, "another version already extends this one"
        lacking = np.concatenate([self.left_out, np.arange(self.num_rows, num_rows)])
        out = are_among(lacking, removed_rows)
        rows = lacking[~out]
        if rows.size:
            self.later.append(rows, vectors_of(rows))
        return VersionIndex(self.base, self.later, self.num_later + rows.size, lacking[out])

    def fold(self, removed_rows: np.ndarray, vectors_of: VectorsOf) -> VersionIndex:
        """Returns an index of the same version with all live rows in a new base.

        Args:
            removed_rows: [g] ascending rows that the version does not recommend.
            vectors_of: Returns unit vectors of rows.
        """
        left = removed_rows[~are_among(removed_rows, self.left_out)]
        rows = self.later.rows.view(self.num_later)
        stay = ~are_among(rows, removed_rows)
        if not self.base.is_outgrown(left.size - int((~stay).sum()), int(stay.sum())):
            vectors = self.later.vectors.view(self.num_later)
            return VersionIndex.on(self.base.edit(left, rows[stay], vectors[stay]), removed_rows)
        live = np.arange(self.num_rows)
        live = live[~are_among(live, removed_rows)]
        with one_thread():
            base = FaissIndex(vectors_of(live), self.base.flat_below, live)
        return VersionIndex.on(base, removed_rows)
