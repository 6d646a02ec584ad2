"""A vector index of a live catalogue: a built base index plus the rows that were added since.

The rows of a version are in the base or among the later rows. Rows that were gone when the base was
made may be in neither. A fold moves the later rows into a new base and leaves out gone rows. A row
that returns after a fold is a later row again.
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
    """Append-only rows and vectors after a base, shared by all versions."""

    def __init__(self, dimensions: int) -> None:
        self.rows = Growing((), np.int64)
        self.vectors = Growing((dimensions,), np.float32)

    def append(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        """Appends rows [n] and their vectors [n, E]."""
        self.rows.append(rows)
        self.vectors.append(vectors)


@dataclass(frozen=True)
class GrownIndex:
    """The immutable vector index of one version. Later rows are searched exhaustively.

    Attributes:
        base: Built index.
        later: Later rows of all versions on this base.
        num_later: Number of later rows that belong to this version.
        left_out: [g] ascending gone rows of the version that are in neither part.
    """

    base: FaissIndex
    later: LaterRows
    num_later: int
    left_out: np.ndarray

    @staticmethod
    def on(base: FaissIndex, left_out: np.ndarray | None = None) -> GrownIndex:
        """Returns the index of a base that contains all rows except `left_out`."""
        none = np.zeros(0, np.int64)
        return GrownIndex(
            base, LaterRows(base.dimensions), 0, none if left_out is None else left_out
        )

    @property
    def num_items(self) -> int:
        """Number of vectors, including those of gone rows that are not left out."""
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

    def at(self, num_rows: int, gone: np.ndarray, vectors_of: VectorsOf) -> GrownIndex:
        """Returns the index of the next version, with the rows that this version lacks.

        The cost grows with these rows only, apart from a search for `left_out` in `gone`.

        Args:
            num_rows: Item rows of the next version.
            gone: [g] ascending gone rows of the next version.
            vectors_of: Returns unit vectors of rows.
        """
        assert self.num_later == self.later.rows.count, "another version already extends this one"
        lacking = np.concatenate([self.left_out, np.arange(self.num_rows, num_rows)])
        out = are_among(lacking, gone)
        rows = lacking[~out]
        if rows.size:
            self.later.append(rows, vectors_of(rows))
        return GrownIndex(self.base, self.later, self.num_later + rows.size, lacking[out])

    def folded(self, gone: np.ndarray, vectors_of: VectorsOf) -> GrownIndex:
        """Returns an index of the same version with all live rows in a new base.

        Args:
            gone: [g] ascending gone rows of the version.
            vectors_of: Returns unit vectors of rows.
        """
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
