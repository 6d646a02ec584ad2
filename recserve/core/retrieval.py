"""What finds the nearest items of a vector: the seam between drafters and an index of items."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class VectorIndex(Protocol):
    """Unit vectors of I item rows of one catalogue version: of all that may be answered at least.

    Implementations: features/vectors/vector_index.py, features/vectors/grown_index.py.
    """

    @property
    def num_items(self) -> int:
        """I."""
        ...

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows [n, k] int64 and inner products [n, k] float32 of the nearest items, best first.

        queries: [n, E] float32. k: 1..I; with k = I every item comes. An index that does not look
        everywhere may find fewer, with row -1 in the places that are left.
        """
        ...
