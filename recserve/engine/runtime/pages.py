"""Pages of the pool: the allocator with its reference counts, and the placement of requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from recserve.core.request import RootKeys
from recserve.engine.runtime.prefix_cache import Match, PrefixCache
from recserve.engine.runtime.scheduler import PageOwner
from recserve.kernels.paged_kv import KVPool


class OutOfPages(RuntimeError):
    """Fewer pages are free than a caller requests."""


class PageAllocator:
    """Free list and reference counts of P pages. A page without references is free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Number of pages without references."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Returns the number of references to a page."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Returns `count` pages with one reference each.

        Raises:
            OutOfPages: If fewer pages are free. None is allocated then.
        """
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages are needed, {len(self._free)} of {self.num_pages} are free"
            )
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Adds a reference to each page. Each page must have a reference already."""
        for page in pages:
            assert self._references[page] > 0, "a free page cannot be shared"
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """Removes a reference from each page. Pages without references become free."""
        for page in pages:
            self._references[page] -= 1
            assert self._references[page] >= 0, "released more often than shared"
            if not self._references[page]:
                self._free.append(page)


@dataclass(frozen=True)
class Placement:
    """The pages of one request. The caller holds one reference to each page.

    Attributes:
        pages: The pages of the prefix in order, then those of the tokens after it.
        num_prefix_pages: Number of pages that hold a token of the prefix.
        found: The prefix cache's entry for the prefix.
    """

    pages: list[int]
    num_prefix_pages: int
    found: Match


class PagePlacement:
    """The pages of a pool, with their allocator and prefix cache.

    Attributes:
        pool: The key-value pool.
        page_size: Tokens per page.
        allocator: The allocator of the pages, that of `sharing` if given.
        cache: The prefix cache, that of `sharing` if given.
    """

    def __init__(self, pool: KVPool, sharing: PageOwner | None = None) -> None:
        self.pool, self.page_size = pool, pool.page_size
        self.allocator = sharing.allocator if sharing else PageAllocator(pool.num_pages)
        self.cache = sharing.cache if sharing else PrefixCache(self.allocator, self.page_size)

    def place(self, prefix: RootKeys, num_after: int, separate: bool) -> Placement | None:
        """Returns pages for a prefix and the tokens after it, or None if too few pages are free.

        Args:
            prefix: Keys of the prefix.
            num_after: Number of tokens after the prefix.
            separate: Whether the tokens after the prefix begin a page of their own. If so, a partly
                filled last page of a fully cached prefix is shared. Otherwise it is copied, and the
                copy is continued.
        """
        found, rows = self.cache.match(prefix.keys, prefix.shared), prefix.keys.shape[0]
        held = found.pages + ([] if found.partial is None else [found.partial])
        cached = held if separate and found.length == rows else found.pages
        num_prefix = self.pages_of(rows if separate else rows + num_after)
        num_own = num_prefix - len(cached) + (self.pages_of(num_after) if separate else 0)
        self.cache.evict(num_own)
        if self.allocator.num_free < num_own:
            self.allocator.release(held)
            return None
        own = self.allocator.allocate(num_own)
        if found.partial is not None and cached is found.pages:
            self._copy(found.partial, own[0], found.length % self.page_size)
            self.allocator.release([found.partial])
        return Placement(cached + own, num_prefix, found)

    def pages_of(self, tokens: int) -> int:
        """Returns the number of pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def _copy(self, source: int, target: int, rows: int) -> None:
        """Copies keys and values of the first rows of a page."""
        step = torch.arange(rows, device=self.pool.keys.device)
        self.pool.copy_slots(source * self.page_size + step, target * self.page_size + step)
