"""The page allocator: free list and reference counts."""

from __future__ import annotations

from collections import deque


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

    def sort_free(self) -> None:
        """Orders the free pages as in a new allocator."""
        self._free = deque(sorted(self._free))
