"""A field of a filter has one meaning, and an answer names values that no item has."""

import numpy as np
import pyarrow as pa
import pytest

from recserve.features.catalog.filters import FilterError, ItemFilters
from recserve.features.tables.items import ItemTable
from recserve.schemas.items import Diversity, InvalidRequest, Quota
from tests.support.live_catalogues import base_of, item_like, put, scores, slate

PATHS = [["Care > Skin"], ["Care"], ["C1"], []]


def rows_of(filters, tree):
    filters.key(tree)
    return np.flatnonzero(filters.evaluate(tree)).tolist()


def filters_with(paths, **columns):
    return ItemFilters(ItemTable(["a", "b", "c", "d"], [""] * 4, paths, pa.table(columns)))


@pytest.mark.parametrize("paths", [PATHS, [[], [], [], []]], ids=["beside", "instead"])
@pytest.mark.parametrize(
    "column, value, rows",
    [
        (["C1", "C2", None, "C1"], "C1", [0, 3]),
        ([["C1"], [], None, ["C2", "C1"]], "C1", [0, 3]),
        ([7, 8, None, 7], 7, [0, 3]),
        (pa.array(["C1", "C2", None, "C1"]).dictionary_encode(), "C1", [0, 3]),
    ],
    ids=["text", "list", "number", "dictionary"],
)
def test_an_own_column_category_is_the_field(paths, column, value, rows):
    filters = filters_with(paths, category=column)
    assert rows_of(filters, {"eq": ["category", value]}) == rows
    assert rows_of(filters, {"eq": ["categories", "Care"]}) == ([0, 1] if paths is PATHS else [])


def test_without_such_a_column_category_means_the_paths():
    filters = filters_with(PATHS, colour=["red"] * 4)
    for name in ("category", "categories"):
        assert rows_of(filters, {"in": [name, ["Care"]]}) == [0, 1]
        assert rows_of(filters, {"eq": [name, "Care > Skin"]}) == [0]


def test_an_unknown_field_names_the_known_ones():
    for name, words in (
        ("colr", "did you mean colour"),
        ("zzz", "known fields: categories, item_id, available_from, expires_at, colour"),
        ("category", "cannot read the type of this column, binary"),
    ):
        filters = filters_with(PATHS, colour=["red"] * 4, category=[b"x"] * 4)
        with pytest.raises(FilterError, match=words):
            filters.key({"eq": [name, "x"]})


def test_values_that_no_item_has_are_named(service):
    category = base_of(service).items.categories[0][0]
    found = slate(service, filter={"in": ["category", [category, category.lower(), "zzz"]]})
    assert found.items and found.exact and "unknown_filter_values" in found.degraded
    assert found.filter_hints == [
        f'category: no item has "{category.lower()}"; did you mean "{category}"?',
        'category: no item has "zzz"',
    ]
    many = {"or": [{"eq": ["price", -n]} for n in range(1, 9)] + [{"range": ["price", -9, -8]}]}
    assert len(slate(service, filter={"not": many}).filter_hints) == 5
    assert not slate(service).filter_hints
    assert not slate(service, filter={"not": {"eq": ["category", category]}}).filter_hints


def test_the_filter_of_a_quota_gives_the_same_hints_and_refusals(service):
    category = base_of(service).items.categories[0][0]
    wrong = {"in": ["category", [category, category.lower(), "zzz"]]}
    hints = slate(service, filter=wrong).filter_hints
    found = slate(service, diversity=_quota(wrong))
    assert found.filter_hints == hints and "unknown_filter_values" in found.degraded
    both = slate(service, filter={"not": {"eq": ["brand", "zzz"]}}, diversity=_quota(wrong))
    assert both.filter_hints == ['brand: no item has "zzz"', *hints]
    many = {"or": [{"eq": ["price", -n]} for n in range(1, 9)]}
    assert len(slate(service, filter={"not": many}, diversity=_quota(wrong)).filter_hints) == 5
    assert not slate(service, diversity=_quota({"eq": ["category", category]})).filter_hints
    for tree in ({"range": ["price", 30, 20]}, {"eq": ["colr", 1]}, {"eq": ["price", "1"]}):
        with pytest.raises(InvalidRequest) as plain:
            slate(service, filter=tree)
        with pytest.raises(InvalidRequest) as of_quota:
            slate(service, diversity=_quota(tree))
        assert of_quota.value.param == f"diversity.at_least.{plain.value.param}"
        assert str(of_quota.value) == f"diversity.at_least.{plain.value}"


def _quota(tree):
    return Diversity(at_least=Quota(count=1, filter=tree))


def test_a_value_of_a_new_item_is_known(service):
    tree = {"eq": ["brand", "Nova"]}
    before = slate(service, filter=tree)
    assert before.filter_hints == slate(service, filter=tree).filter_hints != []
    put(service, item_like(service, "new", attributes={"brand": "Nova"}))
    after = slate(service, filter=tree)
    assert scores(after).keys() == {"new"}
    assert "unknown_filter_values" not in after.degraded and not after.filter_hints
