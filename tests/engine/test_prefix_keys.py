"""A cached prefix is found by its tokens, by the drafter with entries in it, and by its salt."""

import numpy as np
import pytest
import torch

from recserve.core.request import PrefixKeys
from recserve.core.sequence import CachedPrefix
from recserve.engine.kv_cache import PageAllocator, PrefixCache
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.text_engines import eagle, engine_for, prompts
from tests.support.text_plain import drawn_model

SIZE, ROWS = 4, 6
NAMES = [("", b""), ("one", b""), ("two", b""), ("", b"one"), ("one", b"one")]


def filled(shared: int, drafter: str, salt: bytes) -> tuple[PageAllocator, PrefixCache]:
    """Returns a cache that holds one prefix under a drafter and a salt."""
    allocator = PageAllocator(8)
    cache = PrefixCache(allocator, SIZE)
    pages = allocator.allocate(2)
    prefix = PrefixKeys(np.arange(ROWS), shared, drafter=drafter, salt=salt)
    cache.insert(prefix, pages, CachedPrefix(torch.ones(1)))
    allocator.release(pages)
    return allocator, cache


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("stored", NAMES, ids=str)
def test_a_prefix_is_found_by_its_own_drafter_and_salt_only(shared, stored):
    _, cache = filled(shared, *stored)
    for drafter, salt in NAMES:
        prefix = PrefixKeys(np.arange(ROWS), shared, drafter=drafter, salt=salt)
        _, length, cached = cache.match(prefix)
        same = (drafter, salt) == stored
        assert length == (ROWS if same else 0), (stored, drafter, salt)
        assert (cached is not None) == same


@pytest.mark.parametrize("stored", NAMES, ids=str)
def test_forgetting_a_prefix_leaves_those_of_other_drafters(stored):
    allocator, cache = filled(0, *stored)
    for drafter, salt in sorted(NAMES, key=lambda name: name == stored):
        assert cache.num_pages == 2 and allocator.num_free == 6
        cache.drop(cache.digests_of(PrefixKeys(np.arange(ROWS), drafter=drafter, salt=salt)))
    assert cache.num_pages == 0 and allocator.num_free == 8


def write(drafters, names: list[str]) -> tuple[list[list[int]], list[int]]:
    """Lets an engine write the same text with several drafters, one after the other.

    Returns:
        Tokens of the last text's drafts, and the prompt's tokens that each text found cached.
    """
    engine = engine_for(drawn_model(1), 300, drafters)
    prompt = prompts(1, seed=2, low=18, high=19)[0]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    drafts: list[list[int]] = []
    cached = []
    for name in names:
        drafts.clear()
        propose = drafters[name].propose

        def noted(contexts, budgets, propose=propose):
            proposed = propose(contexts, budgets)
            drafts.extend(draft.tokens.tolist() for draft in proposed)
            return proposed

        drafters[name].propose = noted
        answer = engine.run(TextQuery(prompt, params, Speculation(name)))
        drafters[name].propose = propose
        cached.append(answer.timing.prefix_cached)
    return drafts, cached


@torch.inference_mode()
def test_a_drafter_never_reads_the_entries_of_another():
    """Two EAGLE heads with different weights keep their keys and values in the same slots."""

    def heads():
        model = drawn_model(1)
        return {"one": eagle(model, True, seed=5), "two": eagle(model, True, seed=6)}

    alone, _ = write(heads(), ["two"])
    after, cached = write(heads(), ["one", "two"])
    assert any(alone) and after == alone
    assert cached == [0, 0]
    _, cached = write(heads(), ["one", "one"])
    assert cached[0] == 0 < cached[1]


@pytest.mark.parametrize("cached", range(1, 10))
def test_a_beginning_with_a_drafter_is_found_without_its_last_row(cached):
    """The drafter's entry of the next row needs the state of that row, which is computed again."""
    for drafter, length in (("", cached), ("one", cached - 1)):
        allocator = PageAllocator(8)
        cache = PrefixCache(allocator, SIZE)
        pages = allocator.allocate(-(-cached // SIZE))
        prefix = PrefixKeys(np.arange(cached), drafter=drafter)
        cache.insert(prefix, pages, CachedPrefix(torch.ones(1)))
        allocator.release(pages)
        before = [allocator.references(page) for page in pages]
        longer = PrefixKeys(np.arange(cached + 3), drafter=drafter)
        assert cache.match(longer) == (pages, length, None)
        assert [allocator.references(page) for page in pages] == [n + 1 for n in before]
