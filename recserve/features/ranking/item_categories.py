"""Numbers item categories. A path "A > B > C" belongs to "A", "A > B" and "A > B > C".

Names that are canonically equivalent are one category.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recserve.features.words import canonical

PATH_SEPARATOR = " > "
MAX_CATEGORIES = 16


def _prefixes(path: str) -> list[str]:
    """Returns "A", "A > B" and "A > B > C" for the path "A > B > C"."""
    parts = path.split(PATH_SEPARATOR)
    return [PATH_SEPARATOR.join(parts[: i + 1]) for i in range(len(parts))]


def _item_categories(paths: Sequence[str]) -> set[str]:
    return {prefix for path in paths for prefix in _prefixes(canonical(path))}


def category_vocabulary(
    categories: Sequence[Sequence[str]],
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Returns the sorted names of all categories, and their weights.

    A category's weight is log(number of items / number of its items).
    """
    counts: dict[str, int] = {}
    for paths in categories:
        for name in _item_categories(paths):
            counts[name] = counts.get(name, 0) + 1
    names = tuple(sorted(counts))
    return names, tuple(float(np.log(len(categories) / counts[name])) for name in names)


def category_matrix(
    categories: Sequence[Sequence[str]], names: Sequence[str], weights: Sequence[float]
) -> np.ndarray:
    """Returns the category numbers of each item.

    Args:
        categories: Category paths of I items.
        names: [G] known categories. Other categories are ignored.
        weights: [G] weight of each known category.

    Returns:
        [I, K] int32, rarest first, padded with G. K is at most 16; an item keeps its rarest
        categories.
    """
    number = {canonical(name): i for i, name in enumerate(names)}
    rarest: dict[tuple[str, ...], list[int]] = {}  # items share their paths
    for paths in map(tuple, categories):
        if paths not in rarest:
            known = (number[name] for name in _item_categories(paths) if name in number)
            rarest[paths] = sorted(known, key=lambda c: (-weights[c], c))[:MAX_CATEGORIES]
    lists = [rarest[tuple(paths)] for paths in categories]
    width = max(map(len, lists), default=0)
    matrix = np.full((len(lists), max(width, 1)), len(number), dtype=np.int32)
    for row, found in enumerate(lists):
        matrix[row, : len(found)] = found
    return matrix
