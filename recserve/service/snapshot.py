"""One catalogue version with everything that is looked up in it while answering."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch

from recserve.core.retrieval import VectorIndex
from recserve.features.catalog import Catalog
from recserve.features.filters import ItemFilters
from recserve.kernels.trie import Trie, build_trie
from recserve.service.diversity import ItemGroups


@dataclass(frozen=True)
class Snapshot:
    """Immutable; a request reads one snapshot from start to end.

    rows: item id to row. popular [I] int32: rows, most popular first. groups: what diversity is
    counted by. index: the items' vectors, where a retriever was trained.
    """

    catalog: Catalog
    trie: Trie
    filters: ItemFilters
    rows: dict[str, int]
    popular: np.ndarray
    groups: ItemGroups
    index: VectorIndex | None = None

    @staticmethod
    def of(catalog: Catalog, device: torch.device) -> Snapshot:
        """Build the lookups of a catalogue, the trie on the device."""
        codes = torch.from_numpy(catalog.index.codes.astype(np.int64))
        trie = build_trie(codes, catalog.index.codebook_sizes).to(device)
        return Snapshot(
            catalog,
            trie,
            ItemFilters(catalog.items),
            {item_id: row for row, item_id in enumerate(catalog.items.ids)},
            catalog.popular,
            ItemGroups(catalog.items.categories, trie),
        )

    @property
    def num_items(self) -> int:
        """I."""
        return len(self.catalog)

    def rows_of(self, item_ids: Iterable[str]) -> list[int]:
        """Row of each id, -1 where it is unknown."""
        return list(map(self.rows.get, item_ids, repeat(-1)))

    def most_popular(
        self, count: int, excluded: np.ndarray, allowed: np.ndarray | None
    ) -> np.ndarray:
        """At most `count` rows, most popular first, that are allowed and not excluded.

        excluded: item rows, any order, repeats allowed. allowed: bool [I], None: all.
        """
        if allowed is None:
            # Of the first count + X rows at most X are excluded, so the rest of the order is idle.
            head = self.popular[: count + excluded.size]
            return np.asarray(head[~np.isin(head, excluded)][:count])
        usable = allowed.copy()
        usable[excluded] = False
        return np.asarray(self.popular[usable[self.popular]][:count])
