"""Arrays that are in memory while they are small, and mapped from a file without a name if not.

The file lies in the folder for temporary files (`TMPDIR`) and goes with the array. The system may
write its pages to disk when memory is short, so such arrays do not add up in memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

IN_MEMORY_BYTES = 64 << 20
BLOCK_ROWS = 1 << 20


class NoRoomError(RuntimeError):
    """The folder for temporary files cannot hold what does not fit into memory."""


@contextmanager
def temporary_files() -> Iterator[None]:
    """Raises NoRoomError for an OSError of a temporary file."""
    try:
        yield
    except OSError as error:
        raise NoRoomError(
            f"{tempfile.gettempdir()}: data that does not fit into memory cannot be written here "
            f"({error.strerror or error}); set TMPDIR to a folder with room, such as 60 bytes for "
            "each event"
        ) from error


def new_array(size: int, dtype: Any) -> np.ndarray:
    """Returns an uninitialised array of `size` elements. Raises NoRoomError."""
    size_bytes = size * np.dtype(dtype).itemsize
    if size_bytes <= IN_MEMORY_BYTES:
        return np.empty(size, dtype)
    with temporary_files(), tempfile.TemporaryFile() as file:
        if hasattr(os, "posix_fallocate"):
            # A page that finds no room later would end the process.
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        return np.memmap(file, dtype, "w+", shape=(size,))


def blocks(size: int) -> Iterator[slice]:
    """Yields slices that cover `size` rows; none for no rows."""
    for first in range(0, size, BLOCK_ROWS):
        yield slice(first, min(first + BLOCK_ROWS, size))


def take_where(values: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns the values where `kept` [n] bool is True."""
    if values.nbytes <= IN_MEMORY_BYTES:
        return np.asarray(values[kept])
    found, at = new_array(int(np.count_nonzero(kept)), values.dtype), 0
    for part in blocks(len(values)):
        chosen = values[part][kept[part]]
        found[at : at + chosen.size] = chosen
        at += chosen.size
    return found


def counts_before(kept: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns [m] int64 how many of `kept` [n] bool are True before each place, ascending [m]."""
    found, before = np.empty(len(places), np.int64), 0
    last = 0
    for part in blocks(len(kept)):
        first, last = last, int(np.searchsorted(places, part.stop))
        sums = np.cumsum(kept[part], dtype=np.int64)
        within = places[first:last] - part.start
        found[first:last] = before + np.where(within > 0, sums[within - 1], 0)
        before += int(sums[-1])
    found[last:] = before
    return found


def sum_by_row(rows: np.ndarray, num_rows: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Returns what `np.bincount(rows, weights, num_rows)` does, in blocks and in its order."""
    total = np.zeros(num_rows, np.int64 if weights is None else np.float64)
    for part in blocks(len(rows)):
        if weights is None:
            total += np.bincount(rows[part], minlength=num_rows)
        else:
            # The sums so far come first, so each sum adds its weights in the order of the rows.
            every = np.concatenate([np.arange(num_rows), rows[part]])
            total = np.bincount(every, np.concatenate([total, weights[part]]), num_rows)
    return total
