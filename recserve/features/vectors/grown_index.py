"""An index of a live catalogue's item vectors: one that was built, and the rows that came since.

A version's rows are in the base or among the later ones, but for those that were gone when the base
was made. A fold takes the later ones into the base and leaves out what is gone by then; a row that
comes back after that is a later one again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import faiss
import numpy as np

from recserve.features.catalog.row_tables import Growing, are_among
from recserve.features.vectors.faiss_threads import one_thread
from recserve.features.vectors.vector_index import FaissIndex

VectorsOf = Callable[[np.ndarray], np.ndarray]  # rows [n] to unit vectors [n, E] float32


class LaterRows:
    """Rows and vectors behind a base, of all versions; only ever appended."""

    def __init__(self, dimensions: int) -> None:
        self.rows = Growing((), np.int64)
        self.vectors = Growing((dimensions,), np.float32)

    def append(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        """rows [n], vectors [n, E]."""
        self.rows.append(rows)
        self.vectors.append(vectors)


@dataclass(frozen=True)
class GrownIndex:
    """Immutable; of one version. Each later row is compared with every query.

    later: its first `num_later` rows belong to this version. left_out [g] ascending: gone rows of
    the version that are in neither.
    """

    base: FaissIndex
    later: LaterRows
    num_later: int
    left_out: np.ndarray

    @staticmethod
    def on(base: FaissIndex, left_out: np.ndarray | None = None) -> GrownIndex:
        """Of a base that has all rows but some gone ones."""
        none = np.zeros(0, np.int64)
        return GrownIndex(
            base, LaterRows(base.dimensions), 0, none if left_out is None else left_out
        )

    @property
    def num_items(self) -> int:
        """Vectors, those of gone rows that are not left out among them."""
        return self.base.num_items + self.num_later

    @property
    def num_rows(self) -> int:
        """Item rows of the version."""
        return self.num_items + self.left_out.size

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As core/retrieval.py says."""
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

    def at(self, num_rows: int, gone: np.ndarray, vectors_of: VectorsOf) -> GrownIndex:
        """Of the version that follows, with the rows that it has and this one lacks.

        gone [g] ascending. At the cost of those rows, and a search of `left_out` in gone.
        """
        assert self.num_later == self.later.rows.count, "another version has followed this one"
        lacking = np.concatenate([self.left_out, np.arange(self.num_rows, num_rows)])
        out = are_among(lacking, gone)
        rows = lacking[~out]
        if rows.size:
            self.later.append(rows, vectors_of(rows))
        return GrownIndex(self.base, self.later, self.num_later + rows.size, lacking[out])

    def folded(self, gone: np.ndarray, vectors_of: VectorsOf) -> GrownIndex:
        """Of the same version, whose gone rows [g] are ascending, in a base of its own."""
        left = gone[~are_among(gone, self.left_out)]
        rows = self.later.rows.view(self.num_later)
        kept = ~are_among(rows, gone)
        if not self.base.is_outgrown(left.size - int((~kept).sum()), int(kept.sum())):
            vectors = self.later.vectors.view(self.num_later)
            return GrownIndex.on(self.base.edited(left, rows[kept], vectors[kept]), gone)
        live = np.arange(self.num_rows)
        live = live[~are_among(live, gone)]
        with one_thread():
            base = FaissIndex(vectors_of(live), self.base.flat_below, live)
        return GrownIndex.on(base, gone)
