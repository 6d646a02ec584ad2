"""Finds nearest items by inner product, exactly for small catalogues, else by inverted lists."""

from __future__ import annotations

import copy
import math

import faiss
import numpy as np

from recserve.features.vectors.faiss_threads import one_thread

FLAT_BELOW = 50_000
LISTS_SHARE = 16  # a search reads one in 16 inverted lists
TRAINED_PER_LIST = 64
ALL_LISTS_SHARE = 8  # a search for more than an eighth of the items reads all lists


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
        else:
            self._index = faiss.IndexIDMap(flat)
        self._index.add_with_ids(vectors, np.arange(self.num_items) if rows is None else rows)
        self._num_trained, self._num_added = self.num_items, 0

    def is_outgrown(self, num_gone: int, num_new: int) -> bool:
        """Whether to rebuild the index instead of editing so many gone and new rows.

        True if a flat index has become too large, or if most vectors were added after the lists
        were trained.
        """
        too_large = self.num_items - num_gone + num_new >= self.flat_below
        return too_large and (not self.num_lists or self._num_added + num_new > self._num_trained)

    def edited(self, gone: np.ndarray, rows: np.ndarray, vectors: np.ndarray) -> FaissIndex:
        """Returns a copy with some rows removed and others added.

        The lists keep their centroids, so a million items take a quarter of a second.

        Args:
            gone: [g] rows to remove.
            rows: [n] rows to add.
            vectors: [n, E] float32 unit vectors of the added rows.
        """
        new = copy.copy(self)
        new._index = faiss.clone_index(self._index)
        with one_thread():
            new._index.remove_ids(faiss.IDSelectorBatch(np.ascontiguousarray(gone, np.int64)))
            new._index.add_with_ids(np.ascontiguousarray(vectors, np.float32), rows)
        new.num_items, new._num_added = new._index.ntotal, self._num_added + len(rows)
        return new

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Implements `VectorIndex.search` of core/request.py; row -1 pads if k exceeds I."""
        everywhere = k * ALL_LISTS_SHARE > self.num_items
        parameters = None
        if self.num_lists:
            read = self.num_lists if everywhere else math.ceil(self.num_lists / LISTS_SHARE)
            parameters = faiss.SearchParametersIVF(nprobe=read)  # type: ignore[call-arg]
        queries = np.ascontiguousarray(queries, np.float32)
        with one_thread():
            scores, rows = self._index.search(queries, k, params=parameters)
        return rows, scores
