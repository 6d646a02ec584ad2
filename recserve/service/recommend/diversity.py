"""The groups that items belong to, by category; and what a request's `diversity` limits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np

from recserve.core.diversity import Cap, PrefixGroups
from recserve.features.catalog.catalog_version import CatalogVersion
from recserve.kernels.trie.trie_view import TrieView
from recserve.schemas.items import Diversity, InvalidRequest


@dataclass(frozen=True)
class ListedItems:
    """Groups of the bundle's own items.

    offsets [I + 1], groups [m]: item row i is of `groups[offsets[i] : offsets[i + 1]]`. ordered [m]
    the groups, ascending, and rows [m] the item row of each of these.
    """

    offsets: np.ndarray
    groups: np.ndarray
    ordered: np.ndarray
    rows: np.ndarray

    @staticmethod
    def read(lists: list[list[int]]) -> ListedItems:
        """lists: groups of each item row."""
        counts = [len(groups) for groups in lists]
        groups = np.array([group for groups in lists for group in groups], dtype=np.int64)
        order = np.argsort(groups, kind="stable")
        rows = np.repeat(np.arange(len(lists)), counts)
        return ListedItems(np.cumsum([0, *counts]), groups, groups[order], rows[order])

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As in core/diversity.py."""
        counts = self.offsets[rows + 1] - self.offsets[rows]
        place = np.repeat(np.arange(rows.size), counts)
        inner = np.arange(place.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return place, self.groups[self.offsets[rows][place] + inner]

    def items(self, group: int) -> np.ndarray:
        """Item rows of a group."""
        first, last = (np.searchsorted(self.ordered, group, side) for side in ("left", "right"))
        return self.rows[first:last]


class BundleCategories:
    """Category paths by number, for all versions of a bundle.

    A whole path is a group, its parts are not. Requests on several threads may number paths.
    """

    def __init__(self, paths: list[list[str]]) -> None:
        """paths: of each of the bundle's items."""
        self._paths = paths
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next = count()

    @cached_property
    def listed(self) -> ListedItems:
        """The bundle's own items; read when a request first asks for categories."""
        return ListedItems.read([self.of_paths(paths) for paths in self._paths])

    def of_paths(self, paths: list[str]) -> list[int]:
        """Groups of an item, each once; a new path gets a number that no other has."""
        return [self._number(path) for path in dict.fromkeys(paths)]

    def path(self, group: int) -> str:
        """The category path of a group."""
        return self._names[group]

    def _number(self, path: str) -> int:
        found = self._numbers.get(path)
        if found is None:
            number = next(self._next)
            self._names[number] = path  # before anybody can meet the number
            found = self._numbers.setdefault(path, number)
        return found


@dataclass(frozen=True)
class CategoryGroups:
    """Groups as in core/diversity.py: the bundle's, but for rows that said something else since."""

    version: CatalogVersion
    bundle: BundleCategories
    listed: ListedItems

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One group for each path of an item."""
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
        """Those of the bundle that have not changed, and the changed ones."""
        version, places, rows = self.version, [], [np.zeros(0, np.int64)]
        for group in groups.tolist():
            rows.append(self.listed.items(group))
            places += version.log.of_category(self.bundle.path(group), version.num_records)
        old = np.concatenate(rows)
        said = version.record_rows[np.isin(version.record_places, places)]
        return np.concatenate([old[~np.isin(old, version.record_rows)], said])


def caps_of(
    diversity: Diversity | None, version: CatalogVersion, trie: TrieView, bundle: BundleCategories
) -> tuple[Cap, ...]:
    """What a request's `diversity` limits. Raises InvalidRequest for a level there is not."""
    if diversity is None:
        return ()
    caps = []
    if diversity.category is not None:
        caps.append(Cap(CategoryGroups(version, bundle, bundle.listed), diversity.category))
    if diversity.prefix is not None:
        level, limit = diversity.prefix
        if level >= trie.num_levels:
            raise InvalidRequest(
                "diversity.prefix", f"levels are 0..{trie.num_levels - 1}, got {level}"
            )
        caps.append(Cap(PrefixGroups(trie, level), limit))
    return tuple(caps)
