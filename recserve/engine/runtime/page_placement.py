"""Places the tokens of a request in pages, and uses cached pages where the prefix cache has
them.
"""

from __future__ import annotations

import torch

from recserve.core.request import PrefixKeys
from recserve.engine.runtime.pages import PageAllocator
from recserve.engine.runtime.prefix_cache import Match, PrefixCache
from recserve.engine.runtime.scheduler import PageOwner
from recserve.kernels.cache.kv_pool import KVPool


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

    def place(
        self, prefix: PrefixKeys, num_after: int, separate: bool
    ) -> tuple[list[int], Match] | None:
        """Returns pages for a prefix and the tokens after it, or None if too few pages are free.

        Args:
            prefix: Keys of the prefix.
            num_after: Number of tokens after the prefix.
            separate: Whether the tokens after the prefix begin a page of their own. If so, a partly
                filled last page of a fully cached prefix is shared. Otherwise it is copied, and the
                copy is continued.

        Returns:
            The pages of the prefix in order, then those of the tokens after it, and the prefix
            cache's entry for the prefix. The caller holds one reference to each page.
        """
        found = self.cache.match(prefix.keys, prefix.shared, prefix.drafter, prefix.salt or b"")
        rows = prefix.keys.shape[0]
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
            # A drafter's entry of the next row depends on cached rows only.
            copied = found.length % self.page_size + bool(prefix.drafter)
            self._copy(found.partial, own[0], min(copied, self.page_size))
            self.allocator.release([found.partial])
        return cached + own, found

    def pages_of(self, tokens: int) -> int:
        """Returns the number of pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def _copy(self, source: int, target: int, rows: int) -> None:
        """Copies keys and values of the first rows of a page."""
        step = torch.arange(rows, device=self.pool.keys.device)
        self.pool.copy_slots(source * self.page_size + step, target * self.page_size + step)
