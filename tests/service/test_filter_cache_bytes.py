"""The cache of filters counts all that an entry holds, so that its bound is one of the process."""

import gc
import tracemalloc

import numpy as np
import pytest

from recserve.schemas.items import ItemsRequest
from recserve.service import Service, ServiceOptions
from tests.support.tiny_bundle import shared_bundle

CAPACITY_BYTES = 1 << 20


@pytest.fixture
def service(tmp_path):
    store, journal = f"lmdb:{tmp_path}/store", tmp_path / "items"
    with Service.open(shared_bundle(), store, "cpu", ServiceOptions(journal=journal)) as opened:
        yield opened


def test_varied_filters_after_a_change_stay_within_the_bound(service):
    """One changed item and filters of 6 kB, none twice: as much memory as the cache may have."""
    ids = service.catalog.current.catalog.items.ids
    service.put_items(ItemsRequest(items=[{"item_id": ids[7], "categories": ["Care"]}]))
    snapshot = service.catalog.current
    snapshot.filter_cache.capacity_bytes = capacity_bytes = CAPACITY_BYTES // 4
    assert snapshot.items.num_records == 1

    def ask(first):
        for number in range(first, first + 24):
            names = [f"no-such-item-{number}-{n}" for n in range(248)]
            tree = {"in": ["item_id", [*names, ids[7], ids[number]]]}
            found = snapshot.allowed(tree)
            assert set(np.flatnonzero(found.mask()).tolist()) == {7, number}

    ask(100)
    gc.collect()
    tracemalloc.start()
    try:
        ask(200)
        ask(300)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < 2 * capacity_bytes
    assert snapshot.filter_cache.num_bytes <= capacity_bytes
