"""Rows of equal length, cut from one long text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def windows(text: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Returns a text [m] as [n, size] rows; a shorter remainder is dropped.

    Raises:
        ValueError: If the text is shorter than a row.
    """
    count = len(text) // size
    if not count:
        raise ValueError(f"the text has {len(text)} tokens; it needs at least a window of {size}")
    return np.ascontiguousarray(text[: count * size].reshape(count, size), dtype=np.int64)


def shuffled_batches(num_rows: int, batch: int, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """Returns the row numbers of each batch of an epoch, at most `batch` each."""
    order = np.random.default_rng((seed, epoch)).permutation(num_rows)
    return np.array_split(order, -(-num_rows // batch))
