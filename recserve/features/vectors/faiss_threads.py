"""How many threads faiss computes on.

Beside torch's threads, which wait spinning, a second pool costs ten times what it saves, unless the
work is large.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import faiss


@contextmanager
def one_thread() -> Iterator[None]:
    """What the calling thread asks of faiss inside is computed by itself."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
