"""Parameter grids: a subset that covers all values runs by default, the rest is `slow`."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Axis = Mapping[str, Any] | Iterable[Any]


def covering(*axes: Axis, pairs: bool = False) -> list[Any]:
    """Returns all combinations of the axes' values, for `pytest.mark.parametrize`.

    By default a few combinations run, in which every value of every axis occurs. With `pairs`,
    every pair of values of two axes occurs. The other combinations carry the marker `slow`.

    Args:
        axes: Values, or values by their names in the test's id.
        pairs: True covers pairs of values, False only single values.
    """
    named = [_named(axis) for axis in axes]
    every = list(product(*(range(len(axis)) for axis in named)))
    default = _pairwise(every) if pairs else _diagonal([len(axis) for axis in named])
    found = []
    for places in every:
        picked = [axis[place] for axis, place in zip(named, places, strict=True)]
        found.append(_parameter(picked, slow=places not in default))
    return found


def chosen(axis: Axis, *names: str) -> list[Any]:
    """Returns the values of one axis; the named ones run by default, the others are `slow`."""
    named = _named(axis)
    unknown = set(names) - {name for name, _ in named}
    if unknown:
        raise ValueError(f"no value is named {sorted(unknown)}")
    return [_parameter([one], slow=one[0] not in names) for one in named]


def _named(axis: Axis) -> list[tuple[str, Any]]:
    if isinstance(axis, Mapping):
        return list(axis.items())
    return [(_name(value), value) for value in axis]


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
