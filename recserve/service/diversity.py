"""The groups that items belong to, by category and by prefix of their semantic id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recserve.core.diversity import Cap
from recserve.kernels.trie import Trie
from recserve.messages import Diversity, InvalidRequest


class ItemGroups:
    """Groups of one catalogue version, made when a request first asks for them."""

    def __init__(self, categories: Sequence[Sequence[str]], trie: Trie) -> None:
        """categories: paths of each item; a whole path is a group, the parts of it are not."""
        self._categories = categories
        self._trie = trie
        self._kept: dict[int | None, tuple[np.ndarray, np.ndarray]] = {}

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
        numbers: dict[str, int] = {}
        lists = [list(dict.fromkeys(paths)) for paths in self._categories]
        groups = [numbers.setdefault(path, len(numbers)) for paths in lists for path in paths]
        offsets = np.cumsum([0, *map(len, lists)])
        return offsets, np.array(groups, dtype=np.int64)

    def _by_prefix(self, level: int) -> tuple[np.ndarray, np.ndarray]:
        trie = self._trie
        starts = trie.first_leaf[trie.level_starts[level + 1] : trie.level_starts[level + 2]]
        leaves = trie.item_leaves.cpu().numpy()
        groups = np.searchsorted(starts.cpu().numpy(), leaves, side="right") - 1
        return np.arange(trie.num_items + 1), groups
