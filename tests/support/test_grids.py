"""Tests of the subset of a grid that runs by default."""

from itertools import product

import pytest

from tests.support.grids import chosen, covering

SIZES = ("one", "two", "three", "four")
FLAGS = (False, True)
FORMS = {"a": 1, "b": 2, "c": 3}


def default(parameters):
    return [p.values for p in parameters if pytest.mark.slow not in p.marks]


def test_every_value_occurs_by_default_and_every_combination_at_all():
    grid = covering(SIZES, FLAGS, FORMS)
    assert [p.values for p in grid] == list(product(SIZES, FLAGS, FORMS.values()))
    few = default(grid)
    assert len(few) == 4
    assert [set(column) for column in zip(*few, strict=True)] == [set(SIZES), {*FLAGS}, {1, 2, 3}]
    assert grid[0].id == "one-False-a"


def test_every_pair_occurs_by_default():
    few = default(covering(SIZES, FLAGS, FORMS, pairs=True))
    assert len(few) < 24
    for i, j in ((0, 1), (0, 2), (1, 2)):
        axes = (SIZES, FLAGS, tuple(FORMS.values()))
        assert {(row[i], row[j]) for row in few} == set(product(axes[i], axes[j]))


def test_values_are_chosen_by_name():
    assert default(chosen(FORMS, "b")) == [(2,)]
    assert len(chosen(FORMS, "b")) == 3
    with pytest.raises(ValueError, match="no value is named"):
        chosen(FORMS, "d")
