"""Parameter grids: a subset that covers all values runs by default, a few others are `slow`."""

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Axis = Mapping[str, Any] | Collection[Any]


def covering(*axes: Axis, pairs: bool = False) -> list[Any]:
    """Returns combinations of the axes' values, for `pytest.mark.parametrize`.

    By default a few combinations run, in which every value of every axis occurs. With `pairs`,
    every pair of values of two axes occurs. Of the other combinations, at most as many again are
    drawn with a fixed seed, and carry the marker `slow`.

    Args:
        axes: Values, or values by their names in the test's id.
        pairs: True covers pairs of values, False only single values.
    """
    sizes = [len(_named(axis)) for axis in axes]
    every = list(product(*map(range, sizes)))
    default = _pairwise(every) if pairs else _diagonal(sizes)
    return _sample(axes, [places in default for places in every], len(default))


def sampled(*axes: Axis, default: Collection[str], most: int = 6) -> list[Any]:
    """Returns the default combinations of the axes' values, and a few others, which are `slow`.

    Args:
        axes: Values, or values by their names in the test's id.
        default: Ids of the combinations that run by default.
        most: Number of the others that are drawn with a fixed seed.
    """
    ids = ["-".join(name for name, _ in one) for one in product(*map(_named, axes))]
    if unknown := set(default) - set(ids):
        raise ValueError(f"no combination is named {sorted(unknown)}")
    return _sample(axes, [one in default for one in ids], most)


def chosen(axis: Axis, *names: str) -> list[Any]:
    """Returns the values of one axis; the named ones run by default, the others are `slow`."""
    named = _named(axis)
    unknown = set(names) - {name for name, _ in named}
    if unknown:
        raise ValueError(f"no value is named {sorted(unknown)}")
    return [_parameter([one], slow=one[0] not in names) for one in named]


def thin(parameters: Sequence[Any], step: int) -> list[Any]:
    """Returns the parameters, of which every `step`-th default one stays one; the rest is `slow`.

    Args:
        parameters: What `covering` or `chosen` returns.
        step: Distance of the default ones that stay, of which the first is one.
    """
    found, place = [], 0
    for one in parameters:
        if not one.marks:
            one = one if place % step == 0 else one._replace(marks=[pytest.mark.slow])
            place += 1
        found.append(one)
    return found


def _named(axis: Axis) -> list[tuple[str, Any]]:
    if isinstance(axis, Mapping):
        return list(axis.items())
    return [(_name(value), value) for value in axis]


def _sample(axes: Sequence[Axis], default: Sequence[bool], most: int) -> list[Any]:
    """Returns the default combinations, and at most `most` others as slow ones."""
    rest = [number for number, one in enumerate(default) if not one]
    drawn = set(random.Random(0).sample(rest, min(len(rest), most)))
    every = enumerate(product(*map(_named, axes)))
    return [
        _parameter(picked, slow=not default[number])
        for number, picked in every
        if default[number] or number in drawn
    ]


def _name(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "_".join(map(_name, value))
    return str(value).removeprefix("torch.")


def _parameter(picked: Sequence[tuple[str, Any]], slow: bool) -> Any:
    marks = [pytest.mark.slow] if slow else []
    name = "-".join(name for name, _ in picked)
    return pytest.param(*(value for _, value in picked), id=name, marks=marks)


def _diagonal(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(step % size for size in sizes) for step in range(max(sizes))}


def _pairwise(every: Sequence[tuple[int, ...]]) -> Collection[tuple[int, ...]]:
    """Chooses combinations greedily by the number of pairs that they add."""
    pairs = {places: set(combinations(enumerate(places), 2)) for places in every}
    left = set().union(*pairs.values())
    taken: dict[tuple[int, ...], None] = {}
    while left:
        best = max(every, key=lambda places: len(pairs[places] & left))
        taken[best] = None
        left -= pairs[best]
    return taken
