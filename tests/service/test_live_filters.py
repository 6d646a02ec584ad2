"""Filters over a catalogue that changes: never those of another version, and a bounded cache."""

import weakref

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.kernels.trie.trie import build_trie
from recserve.schemas.items import Exclusions, RecommendRequest, RollbackRequest
from recserve.service import live_catalog as live_catalog_module
from recserve.service.snapshot import ENTRY_BYTES, CachedFilter, FilterCache
from tests.support.live_catalogues import base_of, item_like, put, slate

CARE = {"eq": ["category", "Care"]}
FILTERS = [
    CARE,
    {"not": CARE},
    {"range": ["price", None, 12]},
    {"and": [{"range": ["price", 10, None]}, {"not": CARE}]},
]


def fulfils(tree, item):
    """Plainly, by what the item says of itself now."""
    if "not" in tree:
        return not fulfils(tree["not"], item)
    if "and" in tree:
        return all(fulfils(part, item) for part in tree["and"])
    if "eq" in tree:
        return any("Care" in path.split(" > ") for path in item.categories)
    price, (_, low, high) = item.attributes["price"], tree["range"]
    return price is not None and (low is None or price >= low) and (high is None or price <= high)


def assert_filtered(service):
    """Every filter's slates are the unfiltered one without the others, twice, with exclusions too;
    by beams that hold everything.
    """
    every = slate(service).items
    for tree in FILTERS:
        kept = [i for i in every if fulfils(tree, service.item(i.item_id))]
        assert kept and len(kept) < len(every)
        for _ in range(2):
            found = slate(service, filter=tree).items
            assert [i.item_id for i in found] == [i.item_id for i in kept]
            assert [i.score for i in found] == pytest.approx([i.score for i in kept], abs=1e-5)
        without = [i.item_id for i in kept[::3]]
        fields = {"filter": tree, "dense_weight": 0.5}
        both = slate(service, **fields)
        fewer = service.recommend(
            _body(service, exclude=Exclusions(seen=False, item_ids=without), **fields)
        )
        expected = {i.item_id for i in both.items} - set(without)
        assert {i.item_id for i in fewer.items} == expected


def _body(service, **fields):
    history = base_of(service).items.ids[:3]
    return RecommendRequest(history=history, k=700, beam_width=700, **fields)


def test_answers_follow_every_change(service, monkeypatch):
    """New words in and out of the filter, new items, new vectors, hidden ones and back, a rollback,
    a fold; a filter that was asked before is never that of another version.
    """
    ids, vectors = base_of(service).items.ids, base_of(service).vectors
    assert_filtered(service)
    put(service, {"item_id": ids[7], "categories": ["Care > Lips"], "attributes": {"price": 5.0}})
    assert_filtered(service)  # words alone: the trie is the same
    first = put(
        service, item_like(service, "new", price=1.0), item_like(service, "dear", price=90.0)
    )
    assert_filtered(service)
    put(service, {"item_id": ids[7], "categories": ["Makeup"], "attributes": {"price": 50.0}})
    put(service, {"item_id": ids[8], "embedding": vectors[300].tolist()})
    put(service, {"item_id": "new", "categories": ["Hair"]})
    assert_filtered(service)
    service.hide_item("dear")
    service.hide_item(ids[11])
    assert_filtered(service)
    put(service, {"item_id": ids[11]})
    assert_filtered(service)
    service.rollback_items(RollbackRequest(catalog_version=first.catalog_version))
    assert_filtered(service)
    monkeypatch.setattr(live_catalog_module, "MAX_INSERTED", 3)
    put(service, *[item_like(service, f"late-{n}", 30 * n, price=float(n)) for n in range(9)])
    service.catalog._folding.join()
    assert service.catalog.current.base_trie.num_rows > len(base_of(service))
    assert_filtered(service)
    monkeypatch.setattr(live_catalog_module, "MAX_INSERTED", 8192)
    put(
        service,
        item_like(service, "last", price=2.0),
        {"item_id": "late-4", "categories": ["Hair"]},
    )
    assert_filtered(service)


def test_the_same_filter_is_gone_through_once(service, monkeypatch):
    evaluated, filters = [], service.catalog.current.filters
    evaluate = type(filters).evaluate
    monkeypatch.setattr(
        type(filters), "evaluate", lambda f, tree: evaluated.append(f) or evaluate(f, tree)
    )
    snapshot = service.catalog.current
    before = snapshot.allowed(CARE)
    assert snapshot.allowed({"eq": ["category", "Care"]}) is before
    assert before.leaves(snapshot.trie) is before.leaves(snapshot.trie)
    put(service, item_like(service, "new"))
    later = service.catalog.current
    after = later.allowed(CARE)
    assert after is not before and after is later.allowed(CARE)
    assert after.bits is before.bits
    assert after.leaves(later.trie).base is before.leaves(snapshot.trie).base
    assert sum(f is filters for f in evaluated) == 1
    row = later.rows.get("new")
    assert after.at(np.array([row])).all() and after.mask()[row]
    # A request of the version before ends with what it began with.
    assert snapshot.allowed(CARE).num_rows == before.num_rows == after.num_rows - 1


def test_the_cache_is_bounded_by_bytes():
    """Those asked longest ago leave; what is too large for it all is not kept."""
    trie = build_trie(torch.cartesian_prod(torch.arange(30), torch.arange(30)), (30, 30))

    class Version:
        pass

    version = Version()

    def kept():
        items = AllowedItems.of(np.arange(900) % 2 == 0)
        items.leaves(trie)
        return CachedFilter(*(weakref.ref(x) for x in (version, trie)), items, items)

    size = kept().allowed.num_bytes + 1 + ENTRY_BYTES
    cache = FilterCache(3 * size)
    for name in (b"a", b"b", b"c"):
        cache.put(name, kept())
    assert len(cache) == 3 and cache.num_bytes == 3 * size
    assert cache.get(b"a") is not None
    cache.put(b"d", kept())
    assert cache.get(b"b") is None and cache.get(b"a") is not None and len(cache) == 3
    cache.put(b"d", kept())  # in its own place
    assert len(cache) == 3 and cache.num_bytes == 3 * size
    small = FilterCache(size - 1)
    small.put(b"a", kept())
    assert len(small) == 0 and small.num_bytes == 0
