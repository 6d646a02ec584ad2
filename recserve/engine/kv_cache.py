"""The key-value cache of one model: pages, cached prefixes, and the placement of requests.

A full page is found by a chain of hashes over the keys of all rows up to its end. Two users with
the same beginning therefore share pages. The last, partly filled page of a prefix and its final
hidden state are stored under the hash of the whole prefix:

- The same history needs no computation.
- A history with new events copies the partly filled page and continues it.

A drafter may have keys and values of its own in the same slots. The entry of a row then depends on
the target's state one row before. If only a beginning of such a prefix is cached, its last row is
computed again to get that state. A prefix that is cached as a whole has it stored.

The first `shared` rows attend to each other, so their keys are part of every hash. So is the salt
of a prefix: it keeps apart the prefixes of clients who must not learn of each other's.

A page has users, the requests that hold it, and entries of the prefix cache:

    users  entries   the page is
      0       0      free
      0      1..     idle: it becomes free when its entries are evicted
     1..     0..     in use, and never taken

The allocator counts the pages of each kind as they change, so that no step looks at all pages.

States and drafts need memory in addition to the pages: a hidden state of E numbers per prefix, one
more per computed placeholder, and the draft. Item prefixes with such states never outnumber the
pages, because each has a partly filled page of its own or ends with a full page.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from recserve.core.request import PrefixKeys
from recserve.core.sequence import CachedPrefix, Sequence
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.host import on_device
from recserve.kernels.tree_batch import Prefixes

log = logging.getLogger(__name__)

# Bytes of a cache on a CPU, and the least on CUDA.
DEFAULT_BYTES = 256 * 2**20
ROWS = 256  # requests with pages, where a caller sets no bound
LONGEST = 2**17  # tokens of a request
# Share of a GPU's memory that activations, library workspaces and cached states may use.
SPARE_SHARE = 0.1

Digest = bytes


def cache_bytes(device: torch.device, num_models: int, graph_bytes: int) -> int:
    """Returns the bytes of each model's cache where the settings leave the size open.

    The models are loaded already. On CUDA, the caches take the free memory.

    Args:
        device: Device of the models.
        num_models: Number of models that share the device.
        graph_bytes: Memory that CUDA graphs may take.
    """
    if device.type != "cuda":
        return DEFAULT_BYTES
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = int(free - SPARE_SHARE * total) - graph_bytes
    size = max(left // num_models, DEFAULT_BYTES)
    log.info("kv_bytes auto: %.1f GiB for each of %d models", size / 2**30, num_models)
    return size


class OutOfPages(RuntimeError):
    """Fewer pages are free than a caller requests."""


class PageAllocator:
    """Free list of P pages, and for each page the number of its users and cache entries.

    Attributes:
        num_pages: P.
        num_idle: Number of pages that only the prefix cache holds.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages, self.num_idle = num_pages, 0
        self._free = deque(range(num_pages))
        self._users, self._entries = [0] * num_pages, [0] * num_pages

    @property
    def num_free(self) -> int:
        """Number of pages without users and entries."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Returns the number of users and entries of a page."""
        return self._users[page] + self._entries[page]

    def num_released(self, pages: Seq[int]) -> int:
        """Returns how many pages would have no user after `release(pages)`."""
        return sum(self._users[page] == times for page, times in Counter(pages).items())

    def allocate(self, count: int) -> list[int]:
        """Returns `count` pages with one user each.

        Raises:
            OutOfPages: If fewer pages are free. None is allocated then.
        """
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages are needed, {len(self._free)} of {self.num_pages} are free"
            )
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Seq[int]) -> None:
        """Adds a user to each page. No page may be free."""
        for page in pages:
            assert self._users[page] or self._entries[page], "a free page cannot be shared"
            self.num_idle -= not self._users[page]
            self._users[page] += 1

    def release(self, pages: Seq[int]) -> None:
        """Removes a user from each page. A page without users becomes idle or free."""
        for page in pages:
            assert self._users[page], "released more often than shared"
            self._users[page] -= 1
            if self._users[page]:
                continue
            if self._entries[page]:
                self.num_idle += 1
            else:
                self._free.append(page)

    def add_entry(self, page: int) -> None:
        """Adds an entry of the prefix cache to a page, which may not be free."""
        assert self._users[page] or self._entries[page], "a free page cannot be cached"
        self._entries[page] += 1

    def remove_entry(self, page: int) -> None:
        """Removes an entry from a page. A page without entries and users becomes free."""
        assert self._entries[page], "removed more often than added"
        self._entries[page] -= 1
        if not self._entries[page] and not self._users[page]:
            self.num_idle -= 1
            self._free.append(page)

    def sort_free(self) -> None:
        """Orders the free pages as in a new allocator."""
        self._free = deque(sorted(self._free))


class PrefixCache:
    """Least recently used prefixes, in the pages that running requests leave free.

    An entry is a page, for a full page, or what is cached with a whole prefix. The latter has a
    page, too, if the last page of the prefix is partly filled.

    Attributes:
        num_pages: Number of entries that hold a page.
        num_hit_tokens: Prefix tokens found so far.
        num_missed_tokens: Prefix tokens not found so far.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._entries: OrderedDict[Digest, tuple[int | None, CachedPrefix | None]] = OrderedDict()
        self._salts: tuple[bytes, ...] = (b"",)  # of all prefixes so far
        self.num_pages = self.num_hit_tokens = self.num_missed_tokens = 0

    def match(self, prefix: PrefixKeys) -> tuple[list[int], int, CachedPrefix | None]:
        """Finds the longest cached beginning of a prefix, and becomes a user of its pages.

        Returns:
            - The pages of the beginning in order. The last one may be partly filled.
            - Its number of rows.
            - What is cached with the whole prefix. None unless all rows are cached.
        """
        size, n = self._page_size, prefix.keys.shape[0]
        raw = _raw(prefix.keys)
        digests = self._page_digests(raw, prefix, prefix.salt or b"")
        touched: list[Digest] = []
        pages: list[int] = []
        for digest in digests[1:]:
            page, _ = self._entries.get(digest, (None, None))
            if page is None:
                break
            touched.append(digest)
            pages.append(page)
        full = len(pages)
        length, whole = full * size, None
        for end in range(min(n, length + size - 1), length - 1, -1):
            digest = self._end_digest(digests[full], raw[length * 8 : end * 8])
            entry = self._entries.get(digest)
            if entry is not None:
                page, cached = entry
                length, whole = end, cached if end == n else None
                pages += [] if page is None else [page]
                touched.append(digest)
                break
        if full and length == n == full * size and whole is None:
            # All pages are cached without the final hidden state: the last page is computed again.
            pages, length = pages[:-1], length - size
            touched.pop()
        if length < prefix.shared:
            # The shared rows are computed together, so a part of them is of no use.
            length, pages, touched, whole = 0, [], [], None
        for digest in reversed(touched):
            self._entries.move_to_end(digest)
        if prefix.drafter and 0 < length < n:
            length -= 1
        self._allocator.share(pages)
        self.num_hit_tokens += length
        self.num_missed_tokens += n - length
        return pages, length, whole

    def insert(self, prefix: PrefixKeys, pages: Seq[int], whole: CachedPrefix) -> None:
        """Stores a computed prefix.

        Args:
            prefix: Its keys.
            pages: All pages of the prefix in order. The last one may be partly filled.
            whole: What to store with the whole prefix. If the prefix is stored already, only
                placeholder states are taken over.
        """
        size = self._page_size
        raw, salt = _raw(prefix.keys), prefix.salt or b""
        if salt not in self._salts:
            self._salts = (*self._salts, salt)
        digests = self._page_digests(raw, prefix, salt)
        full = len(digests) - 1
        last = pages[full] if prefix.keys.shape[0] % size else None
        entry = self._put(self._end_digest(digests[full], raw[full * size * 8 :]), last, whole)
        if entry is not None and whole.placeholder_states is not None:
            entry.placeholder_states = whole.placeholder_states
        # Deepest page first, so that a beginning is evicted after everything that continues it.
        for number in range(full - 1, -1, -1):
            self._put(digests[number + 1], pages[number], None)

    def digests_of(self, prefix: PrefixKeys) -> list[Digest]:
        """Returns the digests of all entries that a prefix and its beginnings can have.

        Prefixes of at most `prefix.kept` rows and the full pages of these rows are excluded.
        Without a salt, these are the digests under all salts so far. Any thread may call the
        method.
        """
        salts = self._salts if prefix.salt is None else (prefix.salt,)
        return [digest for salt in salts for digest in self._digests_with(salt, prefix)]

    def _digests_with(self, salt: bytes, prefix: PrefixKeys) -> list[Digest]:
        size, raw, kept, n = self._page_size, _raw(prefix.keys), prefix.kept, prefix.keys.shape[0]
        pages = self._page_digests(raw, prefix, salt)
        of_ends = [
            self._end_digest(pages[start // size], raw[start * 8 : end * 8])
            for start in range(kept - kept % size, n + 1, size)
            for end in range(start, min(start + size, n + 1))
            if end > kept or not kept
        ]
        return [*of_ends, *pages[1 + kept // size :]]

    def drop(self, digests: Iterable[Digest]) -> None:
        """Removes the entries that exist, even if other prefixes share them."""
        for digest in digests:
            if digest in self._entries:
                self._remove(self._entries.pop(digest)[0])

    def clear(self) -> None:
        """Removes all entries. Running requests keep their pages."""
        while self._entries:
            self._remove(self._entries.popitem(last=False)[1][0])

    def evict(self, count: int) -> bool:
        """Removes least recently used entries until `count` pages are free.

        Each entry that it looks at is gone afterwards, so the cost of an entry is paid once.

        Returns:
            False if that many pages cannot become free. Nothing is removed then.
        """
        allocator = self._allocator
        if allocator.num_free + allocator.num_idle < count:
            return False
        while allocator.num_free < count:
            _, (page, _) = self._entries.popitem(last=False)
            self._remove(page)
        return True

    def _put(
        self, digest: Digest, page: int | None, whole: CachedPrefix | None
    ) -> CachedPrefix | None:
        """Stores an entry unless it exists. Returns what is stored with the whole prefix."""
        if digest not in self._entries:
            self._entries[digest] = page, whole
            if page is not None:
                self._allocator.add_entry(page)
                self.num_pages += 1
        self._entries.move_to_end(digest)
        return self._entries[digest][1]

    def _remove(self, page: int | None) -> None:
        if page is not None:
            self._allocator.remove_entry(page)
            self.num_pages -= 1

    def _page_digests(self, raw: bytes, prefix: PrefixKeys, salt: bytes) -> list[Digest]:
        """Returns a chain of hashes: one before the first page, then one after each full page."""
        size, shared = self._page_size, prefix.shared
        first = raw[: shared * 8] + shared.to_bytes(8, "little") + prefix.drafter.encode()
        digest = blake2b(first, digest_size=16, key=salt).digest()
        digests = [digest]
        for start in range(0, len(raw) - size * 8 + 1, size * 8):
            digest = blake2b(digest + raw[start : start + size * 8], digest_size=16).digest()
            digests.append(digest)
        return digests

    @staticmethod
    def _end_digest(before: Digest, raw: bytes) -> Digest:
        return blake2b(before + raw, digest_size=16, person=b"tail").digest()


class KVCache:
    """The pages of one model's key-value pool, shared by all schedulers of the model.

    An admitted request has a row of the slot table: the slots of its pages, in order. A row stays
    at its address, so captured steps read it, and a request that grows moves nothing.

    Attributes:
        pool: The key-value pool.
        page_size: S, tokens per page.
        allocator: Free pages.
        prefixes: The prefix cache.
        width: W, most tokens of a request.
        slots: [R, W] int64 slot table. Row 0 belongs to no request; its slots are the spare slot.
            What follows a request's last slot in its row has no meaning.
    """

    def __init__(self, pool: KVPool, num_rows: int = ROWS, longest: int = 0) -> None:
        """Reserves the slot table. On a CPU only the memory that requests use is ever touched.

        Args:
            pool: The key-value pool.
            num_rows: Most requests with pages.
            longest: Tokens that a row has room for, even where the pool has fewer. At least LONGEST
                of the pool's tokens have room.
        """
        self.pool, self.page_size = pool, pool.page_size
        self.allocator = PageAllocator(pool.num_pages)
        self.prefixes = PrefixCache(self.allocator, pool.page_size)
        device, most = pool.keys.device, min(pool.num_pages * pool.page_size, LONGEST)
        self.width = self.pages_of(max(most, longest)) * pool.page_size
        self.slots = torch.empty(num_rows + 1, self.width, dtype=torch.int64, device=device)
        self.slots[0] = pool.spare_slot
        self._host = self.slots.numpy() if device.type == "cpu" else None
        self._free_rows = list(range(num_rows, 0, -1))
        self._in_page = np.arange(pool.page_size)

    @property
    def num_available(self) -> int:
        """Number of pages that `allocate` can return: those that no request holds."""
        return self.allocator.num_free + self.allocator.num_idle

    def pages_of(self, tokens: int) -> int:
        """Returns the number of pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def slots_of(self, pages: Seq[int]) -> NDArray[np.int64]:
        """Returns the slots of pages, in order."""
        return (np.array(pages, np.int64)[:, None] * self.page_size + self._in_page).ravel()

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` pages, evicting cached prefixes for them. None if requests hold them."""
        return self.allocator.allocate(count) if self.prefixes.evict(count) else None

    def place(
        self, sequence: Sequence, prefix: PrefixKeys, num_after: int, separate: bool
    ) -> tuple[int, CachedPrefix | None] | None:
        """Gives a request a row, and pages for its prefix and the tokens after it.

        Args:
            sequence: The request, which becomes a user of the pages.
            prefix: Keys of its prefix.
            num_after: Number of tokens after the prefix.
            separate: Whether the tokens after the prefix begin a page of their own. If so, a partly
                filled last page of a fully cached prefix is shared. Otherwise it is copied, and the
                copy is continued.

        Returns:
            The number of cached rows, and what is cached with the whole prefix: None unless all
            rows are cached. None instead of both if too few pages are free, or no row.
        """
        if not self._free_rows:
            return None
        matches, length, whole = self.prefixes.match(prefix)
        rows, full = prefix.keys.shape[0], length // self.page_size
        cached = matches if separate and length == rows else matches[:full]
        num_pages = self.pages_of(rows if separate else rows + num_after)
        num_pages += self.pages_of(num_after) if separate else 0
        own = self.allocate(num_pages - len(cached))
        if own is None:
            self.allocator.release(matches)
            if self.num_available < self.allocator.num_pages:
                return None
            # No request holds a page, so waiting frees none. The page to copy is in the way.
            matches, cached, length, whole = [], [], 0, None
            own = self.allocate(num_pages)
            if own is None:
                return None
        pages, partial = cached + own, matches[len(cached) :]
        try:
            if partial:
                # A drafter's entry of the next row depends on cached rows only.
                num_copied = length % self.page_size + bool(prefix.drafter)
                self._copy(partial[0], own[0], min(num_copied, self.page_size))
            self._write(self._free_rows[-1], 0, pages)
        except BaseException:
            self.allocator.release(pages)
            raise
        finally:
            self.allocator.release(partial)
        sequence.row, sequence.pages = self._free_rows.pop(), pages
        sequence.slots = self.slots[sequence.row]
        return length, whole

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Adds pages to those of a request. Returns False if other requests hold them."""
        new = self.allocate(count)
        if new is None:
            return False
        self._write(sequence.row, len(sequence.pages), new)
        sequence.pages += new
        return True

    def release(self, sequence: Sequence) -> None:
        """Takes back the row and the pages of a request."""
        self.allocator.release(sequence.pages)
        if sequence.row:
            self._free_rows.append(sequence.row)
        sequence.row, sequence.pages = 0, []

    def before(self, sequences: Seq[Sequence], lengths: Seq[int]) -> Prefixes:
        """Returns the first tokens of requests as what is under their trees."""
        return Prefixes(self.slots, [s.row * self.width for s in sequences], lengths)

    def _write(self, row: int, first: int, pages: Seq[int]) -> None:
        """Writes the slots of pages to a row, as its pages from number `first` on."""
        slots, start = self.slots_of(pages), first * self.page_size
        if self._host is not None:
            self._host[row, start : start + slots.shape[0]] = slots
        else:
            place = self.slots[row, start : start + slots.shape[0]]
            place.copy_(torch.from_numpy(slots), non_blocking=True)

    def discard(self, prefix: PrefixKeys, pages: Seq[int]) -> None:
        """Removes a prefix whose states are not finite, and zeroes pages that nobody else holds.

        Args:
            prefix: The prefix.
            pages: Its pages, of which the caller is a user.
        """
        self.prefixes.drop(self.prefixes.digests_of(prefix))
        own = [page for page in pages if self.allocator.references(page) == 1]
        self.pool.clear_slots(on_device(self.slots_of(own), self.pool.keys.device))

    def _copy(self, source: int, target: int, rows: int) -> None:
        """Copies keys and values of the first rows of a page."""
        step = torch.arange(rows, device=self.pool.keys.device)
        self.pool.copy_slots(source * self.page_size + step, target * self.page_size + step)


def _raw(keys: np.ndarray) -> bytes:
    """Returns the keys as the bytes to hash, 8 for each key."""
    return np.ascontiguousarray(keys, dtype=np.int64).tobytes()
