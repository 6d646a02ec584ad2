"""Item filters: each operator against a plain loop, bounds, and errors that name the place."""

import json

import numpy as np
import pyarrow as pa
import pytest

from recserve.features.catalog.filters import FilterError, ItemFilters
from recserve.features.tables.items import ItemTable

COLOURS = ["red", "blue", None, "red", "green", "blue"]
PRICES = [1.0, 2.5, 3.0, None, 10.0, 2.5]
STOCK = [True, False, True, True, None, False]
TAGS = [["a", "b"], [], None, ["b"], ["c", "a"], ["b", "c"]]
PATHS = [["Care > Skin"], ["Care > Hair", "Gifts"], [], ["Makeup"], ["Makeup > Lips"], ["Gifts"]]


def allowed(filters, tree):
    filters.key(tree)
    return filters.evaluate(tree)


@pytest.fixture(scope="module")
def filters():
    attributes = pa.table(
        {"colour": COLOURS, "price": PRICES, "stock": STOCK, "tags": TAGS, "blob": [b"x"] * 6}
    )
    return ItemFilters(ItemTable([f"i{n}" for n in range(6)], [""] * 6, PATHS, attributes))


@pytest.mark.parametrize(
    "tree, rows",
    [
        ({"eq": ["colour", "red"]}, [0, 3]),
        ({"eq": ["colour", "none"]}, []),
        ({"not": {"eq": ["colour", "red"]}}, [1, 2, 4, 5]),
        ({"in": ["colour", ["blue", "green"]]}, [1, 4, 5]),
        ({"eq": ["tags", "b"]}, [0, 3, 5]),
        ({"eq": ["price", 2.5]}, [1, 5]),
        ({"range": ["price", 2.5, None]}, [1, 2, 4, 5]),
        ({"range": ["price", 2.5, 3]}, [1, 2, 5]),
        ({"range": ["price", 3, 10**400]}, [2, 4]),
        ({"range": ["price", None, None]}, [0, 1, 2, 4, 5]),
        ({"eq": ["stock", False]}, [1, 5]),
        ({"eq": ["category", "Makeup"]}, [3, 4]),
        ({"eq": ["category", "Care > Skin"]}, [0]),
        ({"eq": ["category", "Lips"]}, [4]),
        ({"in": ["item_id", ["i2", "i9"]]}, [2]),
        ({"and": [{"eq": ["category", "Gifts"]}, {"eq": ["tags", "b"]}]}, [5]),
        ({"or": [{"eq": ["colour", "green"]}, {"range": ["price", 0, 1]}]}, [0, 4]),
    ],
    ids=json.dumps,
)
def test_allows_these_rows(filters, tree, rows):
    assert np.flatnonzero(allowed(filters, tree)).tolist() == rows
    assert filters.key(tree) == filters.key(json.loads(json.dumps(tree)))


def nested(depth):
    tree = {"eq": ["colour", "red"]}
    for _ in range(depth):
        tree = {"not": tree}
    return tree


@pytest.mark.parametrize(
    "tree, param, words",
    [
        (nested(8), "not.not.not.not.not.not.not.not", "8 levels"),
        ({"or": [{"eq": ["colour", "red"]}] * 65}, "or[64].eq", "64"),
        ({}, "", "only key, got an object with nothing"),
        ({"eq": ["colour", "red"], "or": []}, "", "only key, got an object with eq, or"),
        ({"and": []}, "and", "one condition"),
        ({"near": ["colour", "red"]}, "near", "unknown operator"),
        ({"and": [{"eq": ["colr", "x"]}]}, "and[0].eq", "did you mean colour"),
        ({"eq": ["blob", "x"]}, "eq", "unknown field"),
        ({"eq": ["colour", 3]}, "eq", "text"),
        ({"eq": ["price", "3"]}, "eq", "a number"),
        ({"eq": ["price", True]}, "eq", "a number"),
        ({"eq": ["stock", 1]}, "eq", "true or false"),
        ({"range": ["colour", 1, 2]}, "range", "text"),
        ({"range": ["price", "1", 2]}, "range", "numbers or null"),
        ({"in": ["colour", ["red"] * 1001]}, "in", "1 to 1000 values, got a list of 1001"),
        ({"eq": "colour"}, "eq", '[field, value], got "colour"'),
        ({"eq": [["colour"], 1]}, "eq", "[field, value]"),
        ({"eq": ["colour", ["red"]]}, "eq", "text, number or bool, got a list of 1"),
        ({"in": ["price", [1, {}]]}, "in", "text, number or bool, got an object"),
    ],
    ids=lambda v: json.dumps(v)[:50],
)
def test_refuses_and_names_the_place(filters, tree, param, words):
    with pytest.raises(FilterError, match=words.replace("[", r"\[")) as caught:
        allowed(filters, tree)
    assert caught.value.param == param


def test_a_value_nested_to_the_end_of_the_stack_is_refused(filters):
    """As deep as a decoder makes it, where nothing that walks it recursively would come back."""
    for depth in range(900, 1000):
        value = "red"
        for _ in range(depth):
            value = [value]
        for tree in ({"eq": ["colour", value]}, {"in": ["colour", value]}, {"not": value}):
            with pytest.raises(FilterError):
                allowed(filters, tree)


def test_nesting_up_to_the_bound_works(filters):
    assert np.flatnonzero(allowed(filters, nested(6))).tolist() == [0, 3]
