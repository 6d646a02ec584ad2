"""Filters over changed items leave nothing behind: what they found is cached elsewhere, once."""

import gc
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from recserve.features.catalog.filters import ItemFilters
from recserve.features.catalog.item_records import SEGMENT, ItemRecord, RecordLog
from recserve.features.tables.items import ItemTable

SCHEMA = pa.schema([("price", pa.float64())])
NUM_FILTERS, NUM_VALUES = 100, 500


def long_filter(number):
    """A filter of 12 kB that fits the item `i<number>` and no other."""
    names = [f"no-such-item-{number}-{n}" for n in range(NUM_VALUES - 1)]
    return {"in": ["item_id", [*names, f"i{number}"]]}


def growth_bytes(work):
    """Bytes that are still allocated after the second of two calls and were not before it."""
    work()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def log_of(count):
    log = RecordLog(SCHEMA)
    log.records += [ItemRecord(f"i{n}", "", [], {"price": float(n)}) for n in range(count)]
    return log


@pytest.mark.slow
def test_a_log_of_one_record_does_not_grow_with_the_filters():
    log, number = log_of(1), iter(range(10**9))

    def ask():
        for _ in range(NUM_FILTERS):
            n = next(number)
            assert log.allowed(long_filter(n), 1).tolist() == [n == 0]

    assert growth_bytes(ask) < 100_000


def test_small_filters_over_full_segments_leave_nothing_behind():
    count = SEGMENT + 3
    log, number = log_of(count), iter(range(10**9))

    def ask():
        for _ in range(NUM_FILTERS):
            low = next(number)
            found = log.allowed({"range": ["price", low, None]}, count)
            assert np.flatnonzero(found).tolist() == list(range(low, count))

    assert growth_bytes(ask) < 50_000


@pytest.mark.slow
def test_filters_over_the_bundles_items_leave_nothing_behind():
    table = pa.table({"price": [1.0, 2.0]})
    filters = ItemFilters(ItemTable(["i0", "i1"], ["", ""], [[], []], table))
    number = iter(range(10**9))

    def ask():
        for _ in range(NUM_FILTERS):
            n = next(number)
            assert filters.evaluate(long_filter(n)).tolist() == [n == 0, n == 1]

    assert growth_bytes(ask) < 100_000
