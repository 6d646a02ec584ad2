"""Filters compare every type of column exactly: drawn columns and filters beside a plain loop."""

import random

import numpy as np
import pyarrow as pa
import pytest

from recserve.features.catalog.filters import FilterError, ItemFilters
from recserve.features.catalog.item_records import ItemRecord, check_attributes, record_table
from recserve.features.tables.items import ItemTable
from tests.support.attribute_filters import (
    ID,
    TYPES,
    arrow_array,
    draw_filter,
    draw_inverted,
    draw_rows,
    fulfils,
)

ITEMS = 30


def filters_of(table):
    ids = [f"i{n}" for n in range(table.num_rows)]
    return ItemFilters(ItemTable(ids, [""] * len(ids), [[] for _ in ids], table))


def rows_of(filters, tree):
    filters.key(tree)
    return np.flatnonzero(filters.evaluate(tree)).tolist()


@pytest.mark.parametrize("seed", range(12))
def test_every_filter_equals_a_plain_loop(seed):
    """Over a file's columns, in chunks, and over the same values as items that were put."""
    draw = random.Random(seed)
    rows = draw_rows(draw, TYPES, ITEMS)
    built = pa.table({n: arrow_array([row[n] for row in rows], k) for n, k in TYPES.items()})
    built = pa.concat_tables([built.slice(0, 7), built.slice(7)])
    filters = filters_of(built)
    records = [
        ItemRecord(f"i{n}", "", [], check_attributes(row, built.schema))
        for n, row in enumerate(rows)
    ]
    live = ItemFilters(record_table(records, built.schema))
    table = ItemTable([r.item_id for r in records], [""] * ITEMS, [[]] * ITEMS, built)
    for n, record in enumerate(records):
        own = {name: value for name, value in table.attribute(n).items() if value is not None}
        assert own == record.attributes
        assert check_attributes(record.attributes, built.schema) == record.attributes
    for _ in range(60):
        tree = draw_filter(draw, TYPES, rows)
        wanted = [n for n, row in enumerate(rows) if fulfils(tree, row, TYPES)]
        assert rows_of(filters, tree) == wanted, tree
        assert rows_of(live, tree) == wanted, tree


@pytest.mark.parametrize("seed", range(4))
def test_a_range_that_ends_before_it_begins_is_refused(seed):
    """In every type that has ranges, and between two whole numbers too."""
    draw = random.Random(seed)
    rows = draw_rows(draw, TYPES, ITEMS)
    built = pa.table({n: arrow_array([row[n] for row in rows], k) for n, k in TYPES.items()})
    filters = filters_of(built)
    ranged = [name for name in TYPES if name not in ("flag", "word", "kind", "words")]
    for name in ranged * 8:
        operand = draw_inverted(draw, name, [row[name] for row in rows])
        if operand is None or name == "moment_s":  # ends within one second are equal there
            continue
        with pytest.raises(FilterError, match=f"{name} has a range whose low end is above"):
            rows_of(filters, {"not": {"range": operand}})
    for operand in (
        ["int8", 1.7, 1.2],
        ["moment_s", "2026-02-10T00:00:00Z", "2026-02-09T00:00:00Z"],
    ):
        with pytest.raises(FilterError, match="got .* and .*"):
            rows_of(filters, {"range": operand})


@pytest.mark.parametrize("operator", ["and", "or"])
def test_64_conditions_are_allowed_however_they_are_combined(operator):
    filters = filters_of(pa.table({"n": [1, 2]}))
    leaf = {"eq": ["n", 1]}
    for tree in (
        {operator: [leaf] * 64},
        {operator: [{"not": leaf}] * 64},
        {operator: [{"and": [{"or": [leaf, {"not": leaf}]}]}] * 32},
    ):
        rows_of(filters, tree)
        for more in ({operator: [tree, leaf]}, {"not": {operator: [leaf, tree]}}):
            with pytest.raises(FilterError, match="at most 64 conditions, got more"):
                rows_of(filters, more)


def test_neighbours_of_a_long_id_are_told_apart():
    filters = filters_of(pa.table({"seller": pa.array([ID + n for n in range(40)], pa.int64())}))
    assert rows_of(filters, {"eq": ["seller", ID + 5]}) == [5]
    assert len(rows_of(filters, {"not": {"eq": ["seller", ID + 5]}})) == 39
    assert rows_of(filters, {"in": ["seller", [ID + 39, ID, ID + 40]]}) == [0, 39]
    assert rows_of(filters, {"range": ["seller", ID + 3, ID + 4]}) == [3, 4]


def test_nan_and_null_fulfil_nothing():
    values = pa.array([1.0, None, float("nan"), float("inf")])
    filters = filters_of(pa.table({"price": values}))
    assert rows_of(filters, {"range": ["price", None, None]}) == [0, 3]
    assert rows_of(filters, {"not": {"eq": ["price", 1]}}) == [1, 2, 3]


@pytest.mark.parametrize(
    "name, literal, words",
    [
        ("int8", "5", "a number"),
        ("int64", True, "a number"),
        ("price", True, "a number"),
        ("price", "much", "a number"),
        ("flag", 1, "true or false"),
        ("day", 5, "RFC 3339"),
        ("day", "2026-02-30", "RFC 3339"),
        ("moment_ms", "2026-02-03T00:00:00", "RFC 3339"),
        ("moment_ms", None, "got null"),
        ("clock", "25:00:00", "RFC 3339"),
        ("word", 1, "text"),
    ],
)
def test_a_literal_of_another_type_is_refused(name, literal, words):
    filters = filters_of(pa.table({name: arrow_array([None], TYPES[name])}))
    for tree in ({"eq": [name, literal]}, {"in": [name, [literal]]}):
        with pytest.raises(FilterError, match=f"field {name} .*{words}"):
            rows_of(filters, tree)


@pytest.mark.parametrize(
    "name, value",
    [
        ("int8", 128),
        ("int8", 1.5),
        ("uint64", -1),
        ("int64", 1e300),
        ("float16", 1e9),
        ("float32", 1e39),
        ("price", 1.005),
        ("price", 10**7),
        ("moment_s", "2026-01-01T00:00:00.5Z"),
        ("day", "yesterday"),
        ("flag", 1),
        ("words", "a"),
    ],
)
def test_a_value_that_a_column_cannot_hold_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected .*, got"):
        check_attributes({name: value}, pa.schema([(name, TYPES[name])]))
