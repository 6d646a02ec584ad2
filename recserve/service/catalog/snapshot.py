"""One catalogue version with everything that is looked up in it while answering."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from recserve.core.allowed import AllowedItems, packed_rows
from recserve.features.catalog.catalog import Catalog, item_keys
from recserve.features.catalog.catalog_version import CatalogVersion, first_version
from recserve.features.catalog.filters import ItemFilters
from recserve.features.catalog.row_map import RowMap
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.vectors.grown_index import GrownIndex
from recserve.kernels.trie.item_graph import ItemGraph
from recserve.kernels.trie.trie import Trie, build_trie
from recserve.kernels.trie.trie_insertion import overlay_trie
from recserve.kernels.trie.trie_view import TrieView
from recserve.service.catalog.filter_cache import CachedFilter, FilterCache
from recserve.service.recommend.diversity import BundleCategories

POPULAR_GROWTH = 10  # how many more popular items are looked at where too few were allowed


@dataclass(frozen=True)
class Snapshot:
    """Immutable; a request reads one snapshot from start to end.

    items: the version. base_trie: of an earlier version, under `trie`. filters: of the bundle's own
    items. asked: what requests filtered by, in any version. categories: as diversity counts them.
    ranking: tables of the ranker, None where there is none. graph: of similar items, None: the
    recommender has none. index: the items' vectors, where a retriever was trained.
    """

    items: CatalogVersion
    base_trie: Trie
    trie: TrieView
    filters: ItemFilters
    filter_cache: FilterCache
    categories: BundleCategories
    ranking: RankingTables | None = None
    graph: ItemGraph | None = None
    index: GrownIndex | None = None

    @staticmethod
    def of(catalog: Catalog, device: torch.device) -> Snapshot:
        """Build the lookups of a bundle's catalogue, the trie on the device."""
        codes = torch.from_numpy(catalog.index.codes.astype(np.int64))
        trie = build_trie(codes, catalog.index.codebook_sizes).to(device)
        rows = {item_id: row for row, item_id in enumerate(catalog.items.ids)}
        first = first_version(catalog, rows)
        filters, categories = ItemFilters(catalog.items), BundleCategories(catalog.items.categories)
        return Snapshot(first, trie, trie, filters, FilterCache(), categories)

    def at(self, items: CatalogVersion, ranking: RankingTables | None, base: Trie) -> Snapshot:
        """The lookups of another version, its trie over a base of it or of an earlier one."""
        same = base is self.base_trie and items.num_rows == self.items.num_rows
        if same and items.gone is self.items.gone:  # only words changed
            return replace(self, items=items, ranking=ranking)
        rows = items.owning[np.searchsorted(items.owning, base.num_rows) :]
        trie = overlay_trie(
            base,
            torch.from_numpy(items.codes[rows].astype(np.int64)).to(base.device),
            torch.from_numpy(rows).to(base.device),
            items.num_rows,
            torch.from_numpy(items.gone),
            self.trie.overlay,
        )
        return replace(self, items=items, base_trie=base, trie=trie, ranking=ranking)

    def compacted_trie(self) -> Trie:
        """A trie of this version without an overlay; hidden items keep their leaves."""
        rows = self.trie.leaf_rows.cpu().long()
        codes = torch.from_numpy(self.items.codes[rows.numpy()].astype(np.int64))
        sizes = self.catalog.index.codebook_sizes
        return build_trie(codes, sizes, rows, self.num_items).to(self.trie.device)

    @property
    def catalog(self) -> Catalog:
        """The bundle's own catalogue, which all versions stand on."""
        return self.items.base

    @property
    def rows(self) -> RowMap[str]:
        """Item id to row, of the items that may be answered."""
        return self.items.visible

    @property
    def num_items(self) -> int:
        """Item rows, hidden and replaced ones included."""
        return self.items.num_rows

    def rows_of(self, item_ids: Iterable[str]) -> list[int]:
        """Row of each id, -1 where it is unknown or hidden."""
        return self.rows.get_many(item_ids)

    def history_rows(self, item_ids: Iterable[str]) -> np.ndarray:
        """[n] int64 row of each id, hidden items too: what a user did stays what it was."""
        ids = list(item_ids)
        rows = np.array(self.rows_of(ids), dtype=np.int64)
        lacking = np.flatnonzero(rows < 0)
        if lacking.size and self.items.gone.size:
            rows[lacking] = self.items.rows_of_keys(item_keys([ids[i] for i in lacking]))
        return rows

    def allowed(self, tree: Any) -> AllowedItems:
        """The items that fulfil a filter. Raises FilterError.

        The first of a filter goes through the catalogue, the first of a version through what
        changed.
        """
        key, items = self.filters.key(tree), self.items
        kept = self.filter_cache.get(key)
        if kept is not None and kept.items() is items and kept.trie() is self.trie:
            return kept.allowed
        earlier = None if kept is None else kept.allowed
        bits = packed_rows(self.filters.evaluate(tree)) if earlier is None else earlier.bits
        said = items.log.allowed(tree, items.num_records)[items.record_places]
        allowed = AllowedItems(bits, items.num_rows, items.record_rows, said, earlier)
        allowed.leaves(self.trie)  # here, so that the engine's thread need not
        self.filter_cache.put(
            key, CachedFilter(weakref.ref(items), weakref.ref(self.trie), allowed)
        )
        return allowed

    def answerable(self, rows: np.ndarray) -> np.ndarray:
        """[n] bool: rows of items that exist in this version and are not hidden."""
        there = (rows >= 0) & (rows < self.num_items)
        return np.asarray(there & ~self.items.are_gone(rows))

    def most_popular(
        self, count: int, excluded: np.ndarray, allowed: AllowedItems | None
    ) -> np.ndarray:
        """At most `count` rows, most popular first, that are allowed and not excluded.

        excluded: item rows, any order, repeats allowed. allowed: None: all.
        """
        # Of the first count + X rows at most X are excluded, so the rest of the order is idle.
        looked_at = count + excluded.size
        while True:
            head = self.items.popular(looked_at)
            kept = head[~np.isin(head, excluded)]
            if allowed is not None:
                kept = kept[allowed.at(kept)]
            if kept.size >= count or head.size < looked_at or allowed is None:
                return np.asarray(kept[:count])
            looked_at *= POPULAR_GROWTH
