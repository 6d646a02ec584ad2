"""Prefix cache: it finds the pages of roots that were computed before.

A full page is found by a chain of hashes over the keys of all rows up to its end. Two users with
the same beginning therefore share pages. The last, partly filled page of a root and its final
hidden state are stored under the hash of the whole root:

- The same history needs no computation.
- A history with new events copies the partly filled page and continues it.

A drafter may have keys and values of its own in the same slots. The entry of a row then depends on
the target's state one row before. If only a beginning of such a root is cached, its last row is
computed again to get that state. A root that is cached as a whole has it stored.

The first `shared` rows attend to each other, so their keys are part of every hash. So is the salt
of a root: it keeps apart the prefixes of clients who must not learn of each other's.

States and metadata need memory in addition to the pages: a hidden state of E numbers per root, one
more per computed placeholder, and the metadata. Item roots with such states never outnumber the
pages, because each has a partly filled page of its own or ends with a full page.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
from torch import Tensor

from recserve.core.prefix_metadata import PrefixMetadata
from recserve.core.request import PrefixKeys
from recserve.engine.runtime.pages import PageAllocator
from recserve.kernels.cache.kv_pool import KVPool, slots_of_pages

Digest = bytes


@dataclass(frozen=True)
class Match:
    """The cached part of a root. The caller holds a reference to each page.

    Attributes:
        pages: Full pages in order.
        partial: Page that holds the next `length % page_size` rows. None if there are none.
        length: Number of cached rows.
        last_hidden: [E] state of the last row. None unless the whole root is cached.
        placeholder_states: [P, E] states of the placeholders after the root. None if not computed.
        metadata: Other data stored with the whole root. Empty if the root is not cached.
    """

    pages: list[int]
    partial: int | None
    length: int
    last_hidden: Tensor | None
    placeholder_states: Tensor | None = None
    metadata: PrefixMetadata = field(default_factory=PrefixMetadata)


@dataclass(frozen=True)
class _Entry:
    page: int | None
    last_hidden: Tensor | None = None
    placeholder_states: Tensor | None = None
    metadata: PrefixMetadata = field(default_factory=PrefixMetadata)


class PrefixCache:
    """Least recently used roots, in the pages that running requests leave free.

    Attributes:
        num_hit_tokens: Prefix tokens found so far.
        num_missed_tokens: Prefix tokens not found so far.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._entries: OrderedDict[Digest, _Entry] = OrderedDict()
        self._salts: tuple[bytes, ...] = (b"",)  # of all roots so far
        self.num_hit_tokens = 0
        self.num_missed_tokens = 0

    @property
    def num_pages(self) -> int:
        """Number of entries that hold a page."""
        return sum(entry.page is not None for entry in list(self._entries.values()))

    def match(
        self, keys: np.ndarray, shared: int = 0, drafter: str = "", salt: bytes = b""
    ) -> Match:
        """Finds the longest cached beginning of a root and adds references to its pages.

        Args:
            keys: [n] int64 keys of the rows.
            shared: Number of first rows that attend to each other. They are found together or not
                at all.
            drafter: As in PrefixKeys.
            salt: As in Prefix.
        """
        size, n = self._page_size, keys.shape[0]
        raw = _raw(keys)
        digests = self._page_digests(raw, shared, drafter, salt)
        touched: list[Digest] = []
        pages: list[int] = []
        for digest in digests[1:]:
            entry = self._entries.get(digest)
            if entry is None or entry.page is None:
                break
            touched.append(digest)
            pages.append(entry.page)
        full = len(pages) * size
        length, partial, last_hidden, placeholder_states, metadata = (
            full,
            None,
            None,
            None,
            PrefixMetadata(),
        )
        for end in range(min(n, full + size - 1), full - 1, -1):
            digest = self._end_digest(digests[len(pages)], raw[full * 8 : end * 8])
            entry = self._entries.get(digest)
            if entry is not None:
                length, partial = end, entry.page
                if end == n:
                    last_hidden, placeholder_states, metadata = (
                        entry.last_hidden,
                        entry.placeholder_states,
                        entry.metadata,
                    )
                touched.append(digest)
                break
        if pages and length == n and last_hidden is None:
            # All pages are cached without the final hidden state: the last page is computed again.
            pages, length = pages[:-1], length - size
            touched.pop()
        if length < shared:
            # The shared rows are computed together, so a part of them is of no use.
            length, pages, partial, touched = 0, [], None, []
            last_hidden, placeholder_states, metadata = None, None, PrefixMetadata()
        for digest in reversed(touched):
            self._entries.move_to_end(digest)
        if drafter and 0 < length < n:
            length -= 1
            if partial is None:
                pages, partial = pages[:-1], pages[-1]
        held = pages + ([partial] if partial is not None else [])
        self._allocator.share(held)
        self.num_hit_tokens += length
        self.num_missed_tokens += n - length
        return Match(
            pages=pages,
            partial=partial,
            length=length,
            last_hidden=last_hidden,
            placeholder_states=placeholder_states,
            metadata=metadata,
        )

    def insert(
        self,
        root: PrefixKeys,
        pages: list[int],
        last_hidden: Tensor,
        placeholder_states: Tensor | None = None,
        metadata: PrefixMetadata | None = None,
    ) -> None:
        """Stores a computed root.

        Args:
            root: Its keys. With a drafter, `last_hidden` includes what that reads.
            pages: All pages of the root in order. The last one may be partly filled.
            last_hidden: [E] state of the last row.
            placeholder_states: [P, E] states of the placeholders. None if there are none.
            metadata: Other data to store with the root.
        """
        size = self._page_size
        raw, salt = _raw(root.keys), root.salt or b""
        if salt not in self._salts:
            self._salts = (*self._salts, salt)
        digests = self._page_digests(raw, root.shared, root.drafter, salt)
        full = len(digests) - 1
        last = pages[full] if root.keys.shape[0] % size else None
        whole = _Entry(last, last_hidden, placeholder_states, metadata or PrefixMetadata())
        self._put(self._end_digest(digests[full], raw[full * size * 8 :]), whole)
        # Deepest page first, so that a beginning is evicted after everything that continues it.
        for number in range(full - 1, -1, -1):
            self._put(digests[number + 1], _Entry(pages[number]))

    def digests_of(self, root: PrefixKeys) -> list[Digest]:
        """Returns the digests of all entries that a root, its pages and its beginnings can have.

        Roots of at most `root.kept` rows and the full pages of these rows are excluded. Without a
        salt, these are the digests under all salts so far. Any thread may call the method.
        """
        salts = self._salts if root.salt is None else (root.salt,)
        return [digest for salt in salts for digest in self._digests_with(salt, root)]

    def _digests_with(self, salt: bytes, root: PrefixKeys) -> list[Digest]:
        size, raw, kept, n = self._page_size, _raw(root.keys), root.kept, root.keys.shape[0]
        pages = self._page_digests(raw, root.shared, root.drafter, salt)
        of_ends = [
            self._end_digest(pages[start // size], raw[start * 8 : end * 8])
            for start in range(kept - kept % size, n + 1, size)
            for end in range(start, min(start + size, n + 1))
            if end > kept or not kept
        ]
        return [*of_ends, *pages[1 + kept // size :]]

    def drop(self, digests: Iterable[Digest]) -> None:
        """Removes the entries that exist, and their references to pages, even if other roots
        share them.
        """
        for digest in digests:
            entry = self._entries.pop(digest, None)
            if entry is not None and entry.page is not None:
                self._allocator.release([entry.page])

    def discard(self, root: PrefixKeys, pages: list[int], pool: KVPool) -> None:
        """Removes a root whose states are not finite, and zeroes the pages that only the caller
        holds.

        Args:
            root: The root.
            pages: Pages of the root, to which the caller still holds references.
            pool: The pool that holds the pages.
        """
        self.drop(self.digests_of(root))
        own = [page for page in pages if self._allocator.references(page) == 1]
        pool.clear_slots(slots_of_pages(own, self._page_size, pool.keys.device))

    def clear(self) -> None:
        """Removes all entries. Running requests keep their references to pages."""
        held = [entry.page for entry in self._entries.values() if entry.page is not None]
        self._entries.clear()
        self._allocator.release(held)

    def evict(self, count: int) -> None:
        """Removes least recently used entries until `count` pages are free.

        If that many pages cannot become free, it removes nothing.
        """
        if self._allocator.num_free >= count:
            return
        # Several entries may hold a page: as a full page, and as the end of a shorter root.
        held = Counter(e.page for e in self._entries.values() if e.page is not None)
        idle = sum(self._allocator.references(page) == n for page, n in held.items())
        if self._allocator.num_free + idle < count:
            return
        while self._entries and self._allocator.num_free < count:
            _, entry = self._entries.popitem(last=False)
            if entry.page is not None:
                self._allocator.release([entry.page])

    def _put(self, digest: Digest, entry: _Entry) -> None:
        if digest not in self._entries:
            self._entries[digest] = entry
            if entry.page is not None:
                self._allocator.share([entry.page])
        elif entry.placeholder_states is not None:
            self._entries[digest] = replace(
                self._entries[digest], placeholder_states=entry.placeholder_states
            )
        self._entries.move_to_end(digest)

    def _page_digests(self, raw: bytes, shared: int, drafter: str, salt: bytes) -> list[Digest]:
        """Returns a chain of hashes: one before the first page, then one after each full page."""
        size = self._page_size
        first = raw[: shared * 8] + shared.to_bytes(8, "little") + drafter.encode()
        digest = blake2b(first, digest_size=16, key=salt).digest()
        digests = [digest]
        for start in range(0, len(raw) - size * 8 + 1, size * 8):
            digest = blake2b(digest + raw[start : start + size * 8], digest_size=16).digest()
            digests.append(digest)
        return digests

    @staticmethod
    def _end_digest(before: Digest, raw: bytes) -> Digest:
        return blake2b(before + raw, digest_size=16, person=b"tail").digest()


def _raw(keys: np.ndarray) -> bytes:
    """Returns the keys as the bytes to hash, 8 for each key."""
    return np.ascontiguousarray(keys, dtype=np.int64).tobytes()
