"""Category groups of items, and the caps that a request's `diversity` sets on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np

from recserve.core.diversity import Cap, PrefixGroups
from recserve.features.catalog.catalog_version import CatalogVersion
from recserve.kernels.trie.trie import Trie
from recserve.schemas.items import Diversity, InvalidRequest


@dataclass(frozen=True)
class ListedItems:
    """Groups of the bundle's own items, in both directions.

    Attributes:
        offsets: [I + 1] int64; item row i belongs to `groups[offsets[i] : offsets[i + 1]]`.
        groups: [m] int64 groups, in the order of item rows.
        ordered: [m] int64 the same groups in ascending order.
        rows: [m] int64 item row of each entry of `ordered`.
    """

    offsets: np.ndarray
    groups: np.ndarray
    ordered: np.ndarray
    rows: np.ndarray

    @staticmethod
    def read(lists: list[list[int]]) -> ListedItems:
        """Builds the arrays from the list of groups of each item row."""
        counts = [len(groups) for groups in lists]
        groups = np.array([group for groups in lists for group in groups], dtype=np.int64)
        order = np.argsort(groups, kind="stable")
        rows = np.repeat(np.arange(len(lists)), counts)
        return ListedItems(np.cumsum([0, *counts]), groups, groups[order], rows[order])

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns index pairs (position in `rows`, group), as defined in core/diversity.py."""
        # Row i of `rows` owns counts[i] consecutive pairs. `place` repeats i, and `inner` counts
        # 0..counts[i] - 1 within the run.
        counts = self.offsets[rows + 1] - self.offsets[rows]
        place = np.repeat(np.arange(rows.size), counts)
        inner = np.arange(place.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return place, self.groups[self.offsets[rows][place] + inner]

    def items(self, group: int) -> np.ndarray:
        """Returns the item rows of a group."""
        first, last = (np.searchsorted(self.ordered, group, side) for side in ("left", "right"))
        return self.rows[first:last]


class BundleCategories:
    """Numbers the category paths of a bundle and of its later versions.

    Each whole path is one group; its parts are not groups. Several threads may call this class.
    """

    def __init__(self, paths: list[list[str]]) -> None:
        """Stores the category paths of each of the bundle's items."""
        self._paths = paths
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next = count()

    @cached_property
    def listed(self) -> ListedItems:
        """Groups of the bundle's own items; built by the first request with a category cap."""
        return ListedItems.read([self.of_paths(paths) for paths in self._paths])

    def of_paths(self, paths: list[str]) -> list[int]:
        """Returns the distinct groups of an item; a new path gets a new number."""
        return [self._number(path) for path in dict.fromkeys(paths)]

    def path(self, group: int) -> str:
        """Returns the category path of a group."""
        return self._names[group]

    def _number(self, path: str) -> int:
        found = self._numbers.get(path)
        if found is None:
            number = next(self._next)
            self._names[number] = path  # stored before another thread can see the number
            found = self._numbers.setdefault(path, number)
        return found


@dataclass(frozen=True)
class CategoryGroups:
    """Category groups of one catalogue version, with the interface of core/diversity.py.

    Attributes:
        version: The version; its changed items override the bundle's groups.
        bundle: Numbers of the category paths.
        listed: Groups of the bundle's own items.
    """

    version: CatalogVersion
    bundle: BundleCategories
    listed: ListedItems

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns index pairs (position in `rows`, group), one per category path of an item."""
        changed = np.isin(rows, self.version.record_rows)
        old = np.flatnonzero(~changed)
        place, group = self.listed.of(rows[old])
        pairs = [
            (place, group)
            for place in np.flatnonzero(changed).tolist()
            for group in self.bundle.of_paths(self.version.record(rows[place]).categories)
        ]
        new = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return np.concatenate([old[place], new[:, 0]]), np.concatenate([group, new[:, 1]])

    def items(self, groups: np.ndarray) -> np.ndarray:
        """Returns the item rows of all given groups in this version."""
        version, places, rows = self.version, [], [np.zeros(0, np.int64)]
        for group in groups.tolist():
            rows.append(self.listed.items(group))
            places += version.log.of_category(self.bundle.path(group), version.num_records)
        old = np.concatenate(rows)
        said = version.record_rows[np.isin(version.record_places, places)]
        return np.concatenate([old[~np.isin(old, version.record_rows)], said])


def caps_of(
    diversity: Diversity | None, version: CatalogVersion, trie: Trie, bundle: BundleCategories
) -> tuple[Cap, ...]:
    """Translates a request's `diversity` into caps.

    Args:
        diversity: The field of the request; None sets no caps.
        version: The catalogue version.
        trie: Its trie.
        bundle: Numbers of the category paths.

    Raises:
        InvalidRequest: If the prefix level does not exist.
    """
    if diversity is None:
        return ()
    caps = []
    if diversity.category is not None:
        caps.append(Cap(CategoryGroups(version, bundle, bundle.listed), diversity.category))
    if diversity.prefix is not None:
        level, limit = diversity.prefix
        if level >= trie.num_levels:
            raise InvalidRequest(
                "diversity.prefix", f"expected a level of 0 to {trie.num_levels - 1}, got {level}"
            )
        caps.append(Cap(PrefixGroups(trie, level), limit))
    return tuple(caps)
