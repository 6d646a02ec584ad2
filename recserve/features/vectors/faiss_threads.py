"""Limits the threads of faiss.

Torch's threads spin while they wait. A second thread pool next to them costs ten times what it
saves, unless the work is large.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import faiss


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs faiss calls of the calling thread without other threads inside the block."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
