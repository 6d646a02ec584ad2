"""Groups by any column: those of a loop in plain Python, in a bundle and in its later versions."""

import random

import numpy as np
import pyarrow as pa
import pytest

from recserve.features.catalog.filters import FilterError, GroupBy, ItemFilters
from recserve.features.catalog.item_groups import MAX_GROUPINGS, BundleGroups, Groupings
from recserve.features.tables.items import ItemTable
from tests.support.attribute_filters import TYPES, _order, arrow_array, draw_rows

PATHS = ["A", "A > B", "A > B > C", "A > D", "E > B", "é", "e\u0301 > B"]


def filters_of(rows, categories):
    columns = {name: arrow_array([row[name] for row in rows], kind) for name, kind in TYPES.items()}
    ids = [f"i{n}" for n in range(len(rows))]
    return ItemFilters(ItemTable(ids, [""] * len(ids), categories, pa.table(columns)))


def values_of(row, name):
    """Values of a column that make groups, as Python compares them."""
    value, kind = row[name], TYPES[name]
    if value is None:
        return set()
    return set(value) if pa.types.is_list(kind) else {_order(kind, value)}


def members(groups, num_items):
    """The sets of rows that share a group, by both directions of the index."""
    places, numbers = groups.index.of(np.arange(num_items))
    assert len(set(zip(places.tolist(), numbers.tolist(), strict=True))) == places.size
    found = {}
    for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
        found.setdefault(number, set()).add(place)
    for number, rows in found.items():
        assert sorted(rows) == sorted(groups.index.items(number).tolist())
    return sorted(sorted(rows) for rows in found.values())


def plain(values):
    found = {}
    for row, own in enumerate(values):
        for value in own:
            found.setdefault(value, []).append(row)
    return sorted(found.values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TYPES)
def test_groups_of_a_column_are_those_of_its_values(name, seed):
    draw = random.Random(f"{name} {seed}")
    rows = draw_rows(draw, TYPES, draw.choice([1, 40]))
    filters = filters_of(rows, [[]] * len(rows))
    groups = BundleGroups(filters, filters.group_by(name, None))
    assert members(groups, len(rows)) == plain([values_of(row, name) for row in rows])


@pytest.mark.parametrize("level", [None, 0, 1, 2, 15])
@pytest.mark.parametrize("field", ["categories", "category"])
def test_levels_of_categories_are_the_beginnings_of_paths(field, level):
    draw = random.Random(f"{field} {level}")
    categories = [draw.sample(PATHS, draw.randrange(4)) for _ in range(50)]
    filters = filters_of(draw_rows(draw, TYPES, 50), categories)
    groups = BundleGroups(filters, filters.group_by(field, level))
    end = None if level is None else level + 1
    cut = [
        {" > ".join(path.replace("e\u0301", "é").split(" > ")[:end]) for path in paths}
        for paths in categories
    ]
    assert members(groups, 50) == plain(cut)


def test_a_column_that_cannot_be_grouped_is_refused_by_name():
    filters = filters_of([], [])
    for field, level, param, message in (
        ("wrd", None, "field", "unknown field 'wrd'; did you mean word?"),
        ("item_id", None, "field", "expected a field that items share"),
        ("word", 1, "level", "only categories has levels, got field 'word'"),
    ):
        with pytest.raises(FilterError, match=message) as error:
            filters.group_by(field, level)
        assert error.value.param == param


def test_only_so_many_columns_stay_grouped():
    groupings = Groupings(filters_of([], []))
    first = groupings.of(GroupBy("categories", 0))
    assert groupings.of(GroupBy("categories", 0)) is first
    for level in range(1, MAX_GROUPINGS + 1):
        groupings.of(GroupBy("categories", level))
    assert groupings.of(GroupBy("categories", 0)) is not first
