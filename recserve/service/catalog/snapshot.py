"""One catalogue version with the lookup structures that requests need."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from recserve.core.allowed import AllowedItems, packed_rows
from recserve.features.catalog.catalog import Catalog, item_keys
from recserve.features.catalog.catalog_version import CatalogVersion, first_version
from recserve.features.catalog.filters import AbsentValue, ItemFilters, equal_values
from recserve.features.catalog.row_tables import RowMap
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.vectors.grown_index import GrownIndex
from recserve.kernels.item_graph import ItemGraph
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.trie import Trie, build_trie
from recserve.service.catalog.filter_cache import CachedFilter, FilterCache
from recserve.service.diversity import BundleCategories

MAX_ABSENT = 5  # values of a filter that no item has; an answer names so many
POPULAR_GROWTH = 10  # factor by which the popularity scan grows if it finds too few items


@dataclass(frozen=True)
class Snapshot:
    """An immutable catalogue version; a request reads one snapshot from start to end.

    Attributes:
        items: The version.
        base_trie: Base of `trie`, of this version or of an earlier one.
        trie: The base trie with the later items inserted.
        filters: Filters over the bundle's own items.
        filter_cache: Filters of earlier requests; all versions share it.
        categories: Category groups that `diversity` limits.
        ranking: Item tables of the ranker; None without a ranker.
        graph: Graph of similar items; None if the recommender has none.
        index: Search index over the retriever's item vectors; None without a retriever.
    """

    items: CatalogVersion
    base_trie: Trie
    trie: Trie
    filters: ItemFilters
    filter_cache: FilterCache
    categories: BundleCategories
    ranking: RankingTables | None = None
    graph: ItemGraph | None = None
    index: GrownIndex | None = None

    @staticmethod
    def of(catalog: Catalog, device: torch.device) -> Snapshot:
        """Builds the snapshot of a bundle's catalogue.

        Args:
            catalog: The catalogue of the bundle.
            device: Device of the trie.
        """
        codes = torch.from_numpy(catalog.index.codes.astype(np.int64))
        trie = build_trie(codes, catalog.index.codebook_sizes).to(device)
        rows = {item_id: row for row, item_id in enumerate(catalog.items.ids)}
        first = first_version(catalog, rows)
        filters, categories = ItemFilters(catalog.items), BundleCategories(catalog.items.categories)
        return Snapshot(first, trie, trie, filters, FilterCache(), categories)

    def at(self, items: CatalogVersion, ranking: RankingTables | None, base: Trie) -> Snapshot:
        """Returns the snapshot of another version.

        Args:
            items: The other version.
            ranking: Its item tables of the ranker; None without a ranker.
            base: Base trie of that version or of an earlier one.
        """
        same = base is self.base_trie and items.num_rows == self.items.num_rows
        if same and items.gone is self.items.gone:  # only titles, categories or attributes changed
            return replace(self, items=items, ranking=ranking)
        rows = items.owning[np.searchsorted(items.owning, base.num_rows) :]
        trie = insert_items(
            base,
            torch.from_numpy(items.codes[rows].astype(np.int64)).to(base.device),
            torch.from_numpy(rows).to(base.device),
            items.num_rows,
            torch.from_numpy(items.gone),
            self.trie,
        )
        return replace(self, items=items, base_trie=base, trie=trie, ranking=ranking)

    def compacted_trie(self) -> Trie:
        """Builds a trie of this version without insertions; hidden items keep their leaves."""
        rows = self.trie.leaf_rows.cpu().long()
        codes = torch.from_numpy(self.items.codes[rows.numpy()].astype(np.int64))
        sizes = self.catalog.index.codebook_sizes
        return build_trie(codes, sizes, rows, self.num_items).to(self.trie.device)

    @property
    def catalog(self) -> Catalog:
        """The bundle's own catalogue, the base of all versions."""
        return self.items.base

    @property
    def rows(self) -> RowMap[str]:
        """Maps the ids of visible items to rows."""
        return self.items.visible

    @property
    def num_items(self) -> int:
        """Number of item rows, including hidden and replaced ones."""
        return self.items.num_rows

    def rows_of(self, item_ids: Iterable[str]) -> list[int]:
        """Returns the row of each id; -1 if the item is unknown or hidden."""
        return self.rows.get_many(item_ids)

    def history_rows(self, item_ids: Iterable[str]) -> np.ndarray:
        """Returns the rows [n] int64 of the items of a history; -1 if an item is unknown.

        Hidden items have rows too, because they remain part of what a user did.
        """
        ids = list(item_ids)
        rows = np.array(self.rows_of(ids), dtype=np.int64)
        lacking = np.flatnonzero(rows < 0)
        if lacking.size and self.items.gone.size:
            rows[lacking] = self.items.rows_of_keys(item_keys([ids[i] for i in lacking]))
        return rows

    def allowed(self, tree: Any) -> AllowedItems:
        """Returns the items that satisfy a filter.

        The first use of a filter scans the bundle's catalogue. The first use in a later version
        scans the changed items only.

        Args:
            tree: The filter as JSON values.

        Raises:
            FilterError: If the filter is invalid.
        """
        key, items = self.filters.key(tree), self.items
        cached = self.filter_cache.get(key)
        if cached is not None and cached.items() is items and cached.trie() is self.trie:
            return cached.allowed
        # An entry of another version still gives the bits of the bundle's own items.
        earlier = None if cached is None else cached.allowed
        bits = packed_rows(self.filters.evaluate(tree)) if earlier is None else earlier.bits
        said = items.log.allowed(tree, items.num_records)[items.record_places]
        allowed = AllowedItems(bits, items.num_rows, items.record_rows, said, earlier)
        allowed.leaves(self.trie)  # computed here to keep the work off the engine's thread
        self.filter_cache.put(
            key, CachedFilter(weakref.ref(items), weakref.ref(self.trie), allowed)
        )
        return allowed

    def absent_values(self, tree: Any) -> tuple[AbsentValue, ...]:
        """Returns the values of `eq` and `in` that no item has, at most MAX_ABSENT.

        An item that has been hidden or changed still counts with the values that it had.

        Args:
            tree: Filter that `allowed` accepts.
        """
        key, items = self.filters.key(tree), self.items
        cached = self.filter_cache.get(key)
        current = cached is not None and cached.items() is items
        if current and cached is not None and cached.absent is not None:
            return cached.absent
        values = self.filters.absent(equal_values(tree))
        if any(values.values()):
            values = items.log.absent(values, items.num_records)
        pairs = ((field, value) for field, given in values.items() for value in given)
        absent = tuple(
            AbsentValue(field, value, self.filters.nearest(field, value))
            for field, value in islice(pairs, MAX_ABSENT)
        )
        if current and cached is not None:
            self.filter_cache.put(key, replace(cached, absent=absent))
        return absent

    def answerable(self, rows: np.ndarray) -> np.ndarray:
        """Returns [n] bool: True for rows that exist in this version and are not hidden."""
        there = (rows >= 0) & (rows < self.num_items)
        return np.asarray(there & ~self.items.are_gone(rows))

    def most_popular(
        self, count: int, excluded: np.ndarray, allowed: AllowedItems | None
    ) -> np.ndarray:
        """Returns up to `count` popular rows that are allowed and not excluded.

        Args:
            count: Number of rows.
            excluded: Item rows in any order; repetitions are allowed.
            allowed: Items to choose from; None allows all.

        Returns:
            Item rows, most popular first.
        """
        # At most X of the first count + X rows are excluded, so this prefix suffices without a
        # filter. With one, it grows until enough rows pass.
        looked_at = count + excluded.size
        while True:
            head = self.items.popular(looked_at)
            rows = head[~np.isin(head, excluded)]
            if allowed is not None:
                rows = rows[allowed.at(rows)]
            if rows.size >= count or head.size < looked_at or allowed is None:
                return np.asarray(rows[:count])
            looked_at *= POPULAR_GROWTH
