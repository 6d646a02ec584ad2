"""Endless scroll as docs/guides/feed.md describes it: pages by `exclude.item_ids`."""

import pytest

from tests.support.live_catalogues import base_of

WIDE = 700


def pages(service, sizes, **fields):
    """Items of the pages, each of which excludes those before it."""
    shown = []
    for k in sizes:
        body = {"history": base_of(service).items.ids[:3], "k": k, **fields}
        answer = service.recommend({**body, "exclude": {"item_ids": shown}})
        assert len(answer.items) == k
        shown += [item.item_id for item in answer.items]
    return shown


@pytest.mark.parametrize("strategy", ["beam", "speculative", "popular", "latest"])
def test_pages_of_wide_searches_are_parts_of_one_slate(service, strategy):
    fields = {"strategy": strategy, "beam_width": WIDE}
    together = pages(service, [60], **fields)
    assert pages(service, [10] * 6, **fields) == together
    assert pages(service, [1, 30, 29], **fields) == together


def test_no_item_comes_twice_until_none_is_left(service):
    count = len(base_of(service)) - 3
    shown = pages(service, [100] * (count // 100))
    assert len(set(shown)) == len(shown)
    body = {"history": base_of(service).items.ids[:3], "k": 100}
    last = service.recommend({**body, "exclude": {"item_ids": shown}})
    assert "fewer_than_k" in last.degraded and len(last.items) == count % 100
    every = [*shown, *(item.item_id for item in last.items)]
    empty = service.recommend({**body, "exclude": {"item_ids": every}})
    assert empty.items == [] and "fewer_than_k" in empty.degraded
