"""The groups that items belong to, by category and by prefix of their semantic id."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from recserve.core.diversity import Cap
from recserve.features.catalog_version import CatalogVersion
from recserve.kernels.trie_overlay import AnyTrie
from recserve.messages import Diversity, InvalidRequest


class BundleCategories:
    """Category groups of the bundle's own items; a whole path is a group, its parts are not."""

    def __init__(self, items: CatalogVersion) -> None:
        self._paths = items.base.items.categories
        self.numbers: dict[str, int] = {}

    def of_paths(self, paths: list[str]) -> list[int]:
        """Groups of an item, each once; a new path gets the next number."""
        numbers = self.numbers
        return [numbers.setdefault(path, len(numbers)) for path in dict.fromkeys(paths)]

    @cached_property
    def groups(self) -> tuple[np.ndarray, np.ndarray]:
        """Offsets [I + 1] and groups [m], as in Cap."""
        lists = [self.of_paths(list(paths)) for paths in self._paths]
        flat = [group for groups in lists for group in groups]
        return np.cumsum([0, *map(len, lists)]), np.array(flat, dtype=np.int64)


class ItemGroups:
    """Groups of one catalogue version, made when a request first asks for them."""

    def __init__(
        self, items: CatalogVersion, trie: AnyTrie, bundle: BundleCategories | None = None
    ) -> None:
        self._items, self._trie = items, trie
        self._bundle = bundle or BundleCategories(items)
        self._kept: dict[int | None, tuple[np.ndarray, np.ndarray]] = {}

    def of_version(self, items: CatalogVersion, trie: AnyTrie) -> ItemGroups:
        """Groups of another version of the same bundle."""
        return ItemGroups(items, trie, self._bundle)

    def caps(self, diversity: Diversity | None) -> tuple[Cap, ...]:
        """What a request's `diversity` limits. Raises InvalidRequest for a level there is not."""
        if diversity is None:
            return ()
        caps = []
        if diversity.category is not None:
            caps.append(Cap(*self._groups(None), diversity.category))
        if diversity.prefix is not None:
            level, limit = diversity.prefix
            if level >= self._trie.num_levels:
                raise InvalidRequest(
                    "diversity.prefix", f"levels are 0..{self._trie.num_levels - 1}, got {level}"
                )
            caps.append(Cap(*self._groups(level), limit))
        return tuple(caps)

    def _groups(self, level: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Offsets [I + 1] and groups [m] of the prefixes that end at a level; None: categories."""
        if level not in self._kept:
            self._kept[level] = self._by_category() if level is None else self._by_prefix(level)
        return self._kept[level]

    def _by_category(self) -> tuple[np.ndarray, np.ndarray]:
        """The bundle's, but for the rows that have said something else since."""
        items = self._items
        offsets, groups = self._bundle.groups
        if not items.record_rows.size:
            return offsets, groups
        said = [
            self._bundle.of_paths(list(items.record(row).categories))
            for row in items.record_rows.tolist()
        ]
        counts = np.zeros(items.num_rows, dtype=np.int64)
        counts[: len(offsets) - 1] = np.diff(offsets)
        kept = np.ones(items.num_rows, dtype=bool)
        kept[items.record_rows] = False
        of_base = np.repeat(kept[: len(offsets) - 1], np.diff(offsets))
        counts[items.record_rows] = [len(one) for one in said]
        merged = np.empty(int(counts.sum()), dtype=np.int64)
        mine = np.repeat(kept, counts)
        merged[mine] = groups[of_base]
        merged[~mine] = [group for one in said for group in one]
        return np.concatenate([[0], np.cumsum(counts)]), merged

    def _by_prefix(self, level: int) -> tuple[np.ndarray, np.ndarray]:
        trie = self._trie
        nodes = trie.nodes_of_items(torch.arange(trie.num_rows, device=trie.device))[:, level]
        return np.arange(trie.num_rows + 1), nodes.cpu().numpy().astype(np.int64)
