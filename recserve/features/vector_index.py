"""Nearest items by inner product: flat for small catalogues, inverted lists for large ones."""

from __future__ import annotations

import math

import faiss
import numpy as np

from recserve.features.faiss_threads import one_thread

FLAT_BELOW = 50_000
LISTS_READ = 16  # one in so many inverted lists is read
TRAINED_PER_LIST = 64
ALL_ABOVE = 8  # a search for more than one item in so many reads all lists
GPU_MOST = 2048  # nearest items that faiss finds on a GPU


class FaissIndex:
    """The unit vectors of a catalogue's items, searched by faiss; on a GPU where faiss has one.

    Flat (exact) below 50,000 items. Above that an inverted file of about 4 sqrt(I) lists, of which
    a search reads one in 16, or all where it asks for more than an eighth of the catalogue, so that
    a strict filter never runs out of items.
    """

    def __init__(self, vectors: np.ndarray, flat_below: int = FLAT_BELOW) -> None:
        """vectors: [I, E] float32 of length 1. Raises ValueError where there is none."""
        if vectors.ndim != 2 or not vectors.shape[0]:
            raise ValueError(f"vectors are {vectors.shape}; expected [items >= 1, dimensions]")
        vectors = np.ascontiguousarray(vectors, np.float32)
        self.num_items: int = vectors.shape[0]
        dimensions = vectors.shape[1]
        self.num_lists = 0
        self._index: faiss.Index = faiss.IndexFlatIP(dimensions)
        if self.num_items >= flat_below:
            self.num_lists = max(1, round(4 * math.sqrt(self.num_items)))
            self._index = faiss.IndexIVFFlat(
                self._index, dimensions, self.num_lists, faiss.METRIC_INNER_PRODUCT
            )
            sample = np.random.default_rng(0).permutation(self.num_items)
            self._index.train(vectors[np.sort(sample[: TRAINED_PER_LIST * self.num_lists])])
        self._index.add(vectors)
        self._gpu: faiss.Index | None = None
        if faiss.get_num_gpus():
            self._gpu = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, self._index)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As core/retrieval.py says."""
        everywhere = k * ALL_ABOVE > self.num_items
        index = self._index
        if self._gpu is not None and k <= GPU_MOST and not everywhere:
            index = self._gpu
        parameters = None
        if self.num_lists:
            read = self.num_lists if everywhere else math.ceil(self.num_lists / LISTS_READ)
            parameters = faiss.SearchParametersIVF(nprobe=read)  # type: ignore[call-arg]
        queries = np.ascontiguousarray(queries, np.float32)
        with one_thread():
            scores, rows = index.search(queries, k, params=parameters)
        return rows, scores


class GrownIndex:
    """An index of a catalogue's first items and the vectors of those that came later.

    The later ones are compared with every query, which is cheap while they are few.
    """

    def __init__(self, base: FaissIndex, later: np.ndarray) -> None:
        """later: [m, E] float32 of length 1, rows `base.num_items` and on."""
        self.base, self.later = base, np.ascontiguousarray(later, np.float32)

    @property
    def num_items(self) -> int:
        """Those of the base and the later ones."""
        return self.base.num_items + len(self.later)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As core/retrieval.py says."""
        queries = np.ascontiguousarray(queries, np.float32)
        rows, scores = self.base.search(queries, min(k, self.base.num_items))
        later = self.base.num_items + np.arange(len(self.later))
        rows = np.concatenate([rows, np.tile(later, (len(rows), 1))], axis=1)
        scores = np.concatenate([scores, queries @ self.later.T], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)


def grown(index: FaissIndex | GrownIndex, vectors: np.ndarray) -> GrownIndex:
    """The index with further items [n, E] behind its own."""
    if isinstance(index, GrownIndex):
        return GrownIndex(index.base, np.concatenate([index.later, vectors]))
    return GrownIndex(index, vectors)
