"""Pages and the prefix cache: what is found, what is shared, what is given back."""

import sys
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recserve.core.request import PrefixKeys
from recserve.core.sequence import CachedPrefix, Sequence
from recserve.engine import kv_cache
from recserve.engine.kv_cache import KVCache, OutOfPages, PageAllocator, PrefixCache
from recserve.engine.round_scheduler import RoundScheduler
from recserve.engine.scheduler import RequestTooLarge
from recserve.kernels.cache.kv_pool import KVPool, KVShape

SIZE = 4
TAIL = torch.zeros(1)


def keys(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def store(cache, allocator, row_keys, shared=0):
    """Compute a prefix and leave it to the cache alone."""
    pages = allocator.allocate(-(-len(row_keys) // SIZE))
    cache.insert(PrefixKeys(row_keys, shared), pages, CachedPrefix(TAIL))
    allocator.release(pages)
    return pages


def found(cache, allocator, row_keys, shared=0):
    pages, length, cached = cache.match(PrefixKeys(row_keys, shared))
    allocator.release(pages)
    return pages, length, cached


def test_allocate_share_release():
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    allocator.share(pages[:1])
    allocator.release(pages)
    assert allocator.num_free == 2 and allocator.references(pages[0]) == 1
    with pytest.raises(OutOfPages, match="3 pages are needed, 2 of 3"):
        allocator.allocate(3)
    assert allocator.num_free == 2


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_a_whole_prefix_is_found_with_its_tail(length):
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, SIZE)
    pages = store(cache, allocator, np.arange(length))
    own, num_found, cached = found(cache, allocator, np.arange(length))
    assert num_found == length and cached.last_hidden is TAIL and own == pages


def test_a_longer_prefix_finds_pages_and_the_partly_filled_one():
    """Cached 0..5 (page 0..3, partial 4 5); asked for 0..8: six rows are there, the tail is not."""
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, SIZE)
    pages = store(cache, allocator, np.arange(6))
    assert found(cache, allocator, np.arange(9)) == (pages, 6, None)
    assert found(cache, allocator, keys(0, 1, 2, 3, 9)) == (pages[:1], 4, None)
    assert found(cache, allocator, keys(0, 1, 2, 9)) == ([], 0, None)


def test_a_page_that_is_to_be_copied_gives_way():
    """Cached 0..5 in all of two pages; to go on behind 5 takes the page that would be copied."""
    cache = KVCache(KVPool(KVShape(1, 1, 4), 2, SIZE))
    store(cache.prefixes, cache.allocator, np.arange(6))
    text = Sequence(request=None, future=Future(), submitted_s=0.0, model="text")
    found = cache.place(text, PrefixKeys(np.arange(6)), 2, separate=False)
    slots = [SIZE * page + place for page in text.pages for place in range(SIZE)]
    assert sorted(text.pages) == [0, 1] and found == (0, None)
    assert text.slots[:8].tolist() == slots
    assert cache.num_available == 0


def test_a_request_has_a_row_with_the_slots_of_its_pages():
    """In order, as it grows, at one address; the next one waits for the row."""
    cache = KVCache(KVPool(KVShape(1, 1, 4), 9, SIZE), num_rows=1)
    one, other = (
        Sequence(request=None, future=Future(), submitted_s=0.0, model="text") for _ in "ab"
    )
    assert cache.place(one, PrefixKeys(np.arange(6)), 1, separate=False) == (0, None)
    row, address = one.row, one.slots.data_ptr()
    assert cache.place(other, PrefixKeys(np.arange(3)), 1, separate=False) is None
    assert other.row == 0 and not other.pages
    assert cache.grow(one, 3) and not cache.grow(one, 5)
    slots = [SIZE * page + place for page in one.pages for place in range(SIZE)]
    assert len(one.pages) == 5 and one.slots[: len(slots)].tolist() == slots
    assert (one.row, one.slots.data_ptr()) == (row, address)
    under = cache.before([one], [7])
    assert [prefix.tolist() for prefix in under] == [slots[:7]] and under.longest == 7
    cache.release(one)
    assert cache.place(other, PrefixKeys(np.arange(3)), 1, separate=False) and other.row == row
    assert cache.slots[0].unique().tolist() == [cache.pool.spare_slot]


def test_a_request_that_is_longer_than_a_row_is_refused(monkeypatch):
    """Though the pool has the pages; one that just fits runs."""
    monkeypatch.setattr(kv_cache, "LONGEST", 4 * SIZE)
    kv = KVCache(KVPool(KVShape(1, 1, 4), 9, SIZE))
    scheduler = RoundScheduler(SimpleNamespace(pool=kv.pool), kv)
    scheduler._check_pages(4, "sixteen tokens")
    with pytest.raises(RequestTooLarge, match="need 5 pages of 4 tokens, .* gets at most 4; req"):
        scheduler._check_pages(5, "seventeen tokens")
    with pytest.raises(RequestTooLarge, match="need 10 pages .* the pool has 9"):
        scheduler._check_pages(10, "forty tokens")


def test_two_users_share_a_beginning():
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, SIZE)
    store(cache, allocator, keys(1, 2, 3, 4, 5))
    pages, length, _ = cache.match(PrefixKeys(keys(1, 2, 3, 4, 6, 7)))
    assert length == 4 and allocator.references(pages[0]) == 2


def test_shared_rows_are_cached_as_one_piece():
    """Rows 0..5 see each other: a prefix whose fifth row differs finds nothing of page one."""
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, SIZE)
    store(cache, allocator, np.arange(9), shared=6)
    assert found(cache, allocator, np.arange(9), shared=6)[1] == 9
    assert found(cache, allocator, keys(0, 1, 2, 3, 4, 5, 6, 9), shared=6)[1] == 0
    assert found(cache, allocator, np.append(np.arange(9), 11), shared=6)[1] == 9
    assert found(cache, allocator, keys(0, 1, 2, 3, 99, 5, 6), shared=6)[1] == 0
    assert found(cache, allocator, np.arange(9), shared=0)[1] == 0


@pytest.mark.parametrize("common", [4, 5, 8, 9, 12])
@pytest.mark.parametrize("shared", [0, 1, 4, 6, 8])
def test_full_pages_behind_the_shared_rows_are_found(common, shared):
    """Prefixes that differ behind `common` rows: all pages before are found, or none is of use."""
    allocator = PageAllocator(20)
    cache = PrefixCache(allocator, SIZE)
    store(cache, allocator, np.arange(13), shared)
    other = np.concatenate([np.arange(common), 100 + np.arange(3)])
    full = common // SIZE * SIZE
    assert found(cache, allocator, other, shared)[1] == (full if full >= shared else 0)


def test_eviction_takes_the_least_recent_and_never_a_running_page():
    allocator = PageAllocator(4)
    cache = PrefixCache(allocator, SIZE)
    for user in range(4):
        store(cache, allocator, np.arange(4) + 10 * user)
    held, _, _ = cache.match(PrefixKeys(np.arange(4)))
    assert cache.evict(1) and allocator.num_free == 1
    assert found(cache, allocator, np.arange(4) + 10)[1] == 0
    assert found(cache, allocator, np.arange(4) + 30)[1] == 4
    assert not cache.evict(4)
    assert allocator.num_free == 1, "one page is held, so four cannot be had and none is dropped"
    allocator.release(held)
    assert cache.evict(4)
    assert allocator.num_free == 4 and cache.num_pages == 0


class CountedPages(list):
    """Counts how many pages are looked at."""

    looks = 0

    def __getitem__(self, page):
        CountedPages.looks += 1
        return super().__getitem__(page)


def calls_of(function, *arguments):
    """Returns a function's result and the number of calls, Python's and C's, inside it."""
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(event) if "call" in event else None)
    try:
        found = function(*arguments)
    finally:
        sys.setprofile(None)
    return found, len(calls)


def test_eviction_costs_the_same_in_a_large_cache():
    """Eight pages of old prefixes are evicted, and eight more than there are, in two sizes."""
    costs = []
    for num_pages in (143, 32_000):
        allocator = PageAllocator(num_pages)
        cache = PrefixCache(allocator, SIZE)
        for number in range(num_pages // 2):
            store(cache, allocator, np.arange(6) + 10 * number)
        held, _, _ = cache.match(PrefixKeys(np.arange(6)))
        free = allocator.num_free
        allocator._users = CountedPages(allocator._users)
        allocator._entries = CountedPages(allocator._entries)
        CountedPages.looks = 0
        evicted, calls = calls_of(cache.evict, free + 8)
        refused, more = calls_of(cache.evict, num_pages)
        assert evicted and not refused and allocator.num_free == free + 8 and len(held) == 2
        costs.append((calls, more, CountedPages.looks))
    assert costs[0] == costs[1], "calls of both evictions, and looks at pages"


def test_forget_drops_every_length_of_a_prefix():
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, SIZE)
    store(cache, allocator, np.arange(5))
    store(cache, allocator, np.arange(7))
    cache.drop(cache.digests_of(PrefixKeys(np.arange(7))))
    assert allocator.num_free == 10 and cache.num_pages == 0
    assert found(cache, allocator, np.arange(5))[1] == 0


@pytest.mark.parametrize("shared", [0, 2])
def test_prefixes_of_another_salt_are_not_found(shared):
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, SIZE)
    prefix = PrefixKeys(np.arange(6), shared, salt=b"one")
    pages = allocator.allocate(2)
    cache.insert(prefix, pages, CachedPrefix(TAIL))
    allocator.release(pages)
    for salt, length in ((b"", 0), (b"two", 0), (b"one", 6)):
        pages, num_found, _ = cache.match(PrefixKeys(prefix.keys, shared, salt=salt))
        assert num_found == length
        allocator.release(pages)


def test_forget_drops_a_prefix_under_every_salt():
    allocator = PageAllocator(12)
    cache = PrefixCache(allocator, SIZE)
    for salt in (b"", b"one", b"two"):
        pages = allocator.allocate(2)
        cache.insert(PrefixKeys(np.arange(6), salt=salt), pages, CachedPrefix(TAIL))
        allocator.release(pages)
    cache.drop(cache.digests_of(PrefixKeys(np.arange(6), salt=b"one")))
    assert allocator.num_free == 8, "the prefixes of the other salts stay"
    cache.drop(cache.digests_of(PrefixKeys(np.arange(6))))
    assert allocator.num_free == 12 and cache.num_pages == 0


def test_there_are_no_more_prefixes_than_pages():
    """Six users' histories grow, are asked for, forgotten in part and evicted, 4,000 times."""
    rng, allocator = np.random.default_rng(0), PageAllocator(12)
    cache, lengths = PrefixCache(allocator, SIZE), np.ones(6, dtype=int)
    most = 0
    for _ in range(4000):
        user = int(rng.integers(6))
        lengths[user] = rng.integers(1, 15) if rng.random() < 0.1 else lengths[user] % 14 + 1
        prefix = np.arange(lengths[user]) + 100 * user
        if rng.random() < 0.1:
            kept = int(rng.integers(len(prefix)))
            cache.drop(cache.digests_of(PrefixKeys(prefix, 0, kept)))
            continue
        held, length, _ = cache.match(PrefixKeys(prefix))
        shared, count = held[: length // SIZE], -(-len(prefix) // SIZE)
        if length < len(prefix):
            cache.evict(count - len(shared))
            own = allocator.allocate(count - len(shared))
            cache.insert(PrefixKeys(prefix), shared + own, CachedPrefix(TAIL))
            allocator.release(own)
        allocator.release(held)
        tails = sum(cached is not None for _, cached in cache._entries.values())
        assert tails <= len({page for page, _ in cache._entries.values()} - {None})
        assert allocator.num_free + allocator.num_idle == allocator.num_pages
        assert cache.num_pages == sum(page is not None for page, _ in cache._entries.values())
        most = max(most, tails)
    assert most > 6


@pytest.mark.parametrize("kept", range(9))
def test_forget_keeps_the_first_rows(kept):
    """Prefixes of 1, 2 .. 8 rows are there; those of the first `kept` rows and their pages stay."""
    allocator = PageAllocator(20)
    cache = PrefixCache(allocator, SIZE)
    for length in range(1, 9):
        store(cache, allocator, np.arange(length))
    cache.drop(cache.digests_of(PrefixKeys(np.arange(8), 0, kept)))
    for length in range(1, 9):
        cached = found(cache, allocator, np.arange(length))[2]
        assert (cached is not None) == (length <= kept)
    assert found(cache, allocator, np.append(np.arange(kept), [77] * 9))[1] == kept
    assert allocator.num_free == 20 - cache.num_pages == 20 - kept


def test_a_prefix_of_whole_pages_that_lost_its_tail_computes_its_last_page_again():
    """8 rows in two pages of 4; the tail was evicted, the pages were not."""
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, SIZE)
    store(cache, allocator, np.arange(8))
    tails = [digest for digest, (page, _) in cache._entries.items() if page is None]
    assert len(tails) == 1
    del cache._entries[tails[0]]
    pages, length, cached = found(cache, allocator, np.arange(8))
    assert (length, len(pages), cached) == (4, 1, None)
    assert found(cache, allocator, np.append(np.arange(8), 9))[1] == 8
