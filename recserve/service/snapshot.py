"""A catalogue version as a request reads it: rows, trie, filters, category groups, lists.

`Snapshot` is the version with its lookup structures, at one time: items that have not begun or have
ended are not in its trie. All snapshots of a bundle share one `FilterCache`, one `Groupings`
and one `Popularity`.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch

from recserve.core.allowed import AllowedItems, packed_rows
from recserve.core.diversity import Cap, PrefixGroups
from recserve.features.catalog.catalog import Catalog, item_keys
from recserve.features.catalog.filters import (
    CATEGORIES,
    AbsentValue,
    FilterError,
    GroupBy,
    ItemFilters,
    equal_values,
)
from recserve.features.catalog.item_groups import Groupings, VersionGroups
from recserve.features.catalog.popularity import Popularity
from recserve.features.catalog.versions import (
    NO_ROWS,
    SCAN_GROWTH,
    CatalogVersion,
    first_version,
)
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.tables.arrays import RowMap, are_among
from recserve.features.vectors.vector_index import VersionIndex
from recserve.kernels.item_graph import ItemGraph
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.trie import Trie, build_trie, catalog_trie
from recserve.schemas.items import Diversity, InvalidRequest
from recserve.search.device_index import DeviceIndex

MAX_ABSENT = 5  # values of a filter that no item has; an answer names so many
POPULAR, LATEST = LISTS = ("popular", "latest")
# From so many hidden items on, a search reads a bitmap: lists of them cost each request more.
MAX_HIDDEN_LISTED = 8192
CAPACITY_BYTES = 256 << 20
# Python objects and tensor headers of one entry: 2.9 kB, measured as growth of the process. For a
# filter over a small catalogue this is nearly the whole size.
ENTRY_BYTES = 3 << 10


@dataclass(frozen=True)
class Snapshot:
    """An immutable catalogue version; a request reads one snapshot from start to end.

    Attributes:
        items: The version.
        base_trie: Base of `trie`, of this version or of an earlier one.
        trie: The base trie with the later items inserted.
        filters: Filters over the bundle's own items.
        filter_cache: Filters of earlier requests; all versions share it.
        groupings: Groups of items by the columns that caps limit.
        popularity: Live counts of events.
        outside: Ascending rows of items that have not begun or have ended.
        shadows: Ascending rows of items that share the semantic id of another item, which is
            recommended for all of them. They are among `outside`, and in no trie.
        until_us: Time at which `outside` changes, in microseconds since 1970; None for never.
        ranking: Item tables of the ranker; None without a ranker.
        graph: Graph of similar items; None if the recommender has none.
        index: Search index over the retriever's item vectors; None without a retriever.
    """

    items: CatalogVersion
    base_trie: Trie
    trie: Trie
    filters: ItemFilters
    filter_cache: FilterCache
    groupings: Groupings
    popularity: Popularity
    outside: np.ndarray
    until_us: int | None
    shadows: np.ndarray
    ranking: RankingTables | None = None
    graph: ItemGraph | None = None
    index: VersionIndex | DeviceIndex | None = None

    @staticmethod
    def of(
        catalog: Catalog,
        device: torch.device,
        popularity: Popularity | None = None,
        shadows: np.ndarray = NO_ROWS,
    ) -> Snapshot:
        """Builds the snapshot of a bundle's catalogue with all of its items, whatever the time.

        Args:
            catalog: The catalogue of the bundle.
            device: Device of the trie.
            popularity: Live counts of events; None starts with the training events.
            shadows: Rows that are in no trie.
        """
        codes = torch.from_numpy(catalog.semantic_ids.codes.astype(np.int64))
        trie = catalog_trie(codes, catalog.semantic_ids.codebook_sizes, shadows).to(device)
        rows = {item_id: row for row, item_id in enumerate(catalog.items.ids)}
        first = first_version(catalog, rows)
        filters = ItemFilters(catalog.items)
        counts = Popularity(catalog.popularity) if popularity is None else popularity
        cache = FilterCache()
        groupings = Groupings(filters)
        return Snapshot(
            first, trie, trie, filters, cache, groupings, counts, shadows, None, shadows
        )

    def at(
        self, items: CatalogVersion, ranking: RankingTables | None, base: Trie, now_us: int
    ) -> Snapshot:
        """Returns the snapshot of another version, or of this one at another time.

        Args:
            items: The other version.
            ranking: Its item tables of the ranker; None without a ranker.
            base: Base trie of that version or of an earlier one.
            now_us: Present time in microseconds since 1970.
        """
        timed, until_us = items.times.outside(now_us), items.times.next_change(now_us)
        outside = _join(timed, self.shadows)
        same = base is self.base_trie and items.num_rows == self.items.num_rows
        same &= items.removed_rows is self.items.removed_rows
        if same and np.array_equal(outside, self.outside):
            # Only titles, categories or attributes changed.
            return replace(self, items=items, ranking=ranking, until_us=until_us)
        rows = items.owning[np.searchsorted(items.owning, base.num_rows) :]
        trie = insert_items(
            base,
            torch.from_numpy(items.codes[rows].astype(np.int64)).to(base.device),
            torch.from_numpy(rows).to(base.device),
            items.num_rows,
            torch.from_numpy(_join(items.removed_rows, timed)),
            self.trie,
            torch.from_numpy(_find_superseded(items)),
        )
        return replace(
            self,
            items=items,
            base_trie=base,
            trie=trie,
            ranking=ranking,
            outside=outside,
            until_us=until_us,
        )

    def compact_trie(self) -> Trie:
        """Builds a trie of this version without insertions; hidden items keep their leaves."""
        rows = self.trie.leaf_rows.cpu().long()
        rows = rows[torch.from_numpy(~are_among(rows.numpy(), _find_superseded(self.items)))]
        codes = torch.from_numpy(self.items.codes[rows.numpy()].astype(np.int64))
        sizes = self.catalog.semantic_ids.codebook_sizes
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

    @cached_property
    def hidden(self) -> np.ndarray:
        """Ascending rows that must not be in an answer."""
        return _join(self.items.removed_rows, self.outside)

    @cached_property
    def shown(self) -> AllowedItems | None:
        """All items that may be in an answer; None if few are hidden, see MAX_HIDDEN_LISTED."""
        if self.hidden.size <= MAX_HIDDEN_LISTED:
            return None
        mask = np.ones(self.num_items, dtype=bool)
        mask[self.hidden] = False
        shown = AllowedItems.of(mask)
        shown.leaves(self.trie)  # computed here to keep the work off the engine's thread
        return shown

    def rows_of(self, item_ids: Iterable[str]) -> list[int]:
        """Returns the row of each id; -1 if the item is unknown, hidden, not begun or ended."""
        rows = self.rows.get_many(item_ids)
        if self.outside.size:
            out = are_among(np.array(rows, dtype=np.int64), self.outside)
            rows = [-1 if gone else row for row, gone in zip(rows, out.tolist(), strict=True)]
        return rows

    def history_rows(self, item_ids: Iterable[str]) -> np.ndarray:
        """Returns the rows [n] int64 of the items of a history; -1 if an item is unknown.

        Hidden items have rows too, because they remain part of what a user did.
        """
        ids = list(item_ids)
        rows = np.array(self.rows.get_many(ids), dtype=np.int64)
        lacking = np.flatnonzero(rows < 0)
        if lacking.size and self.items.removed_rows.size:
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
            return cached.within
        # An entry of another version still gives the bits of the bundle's own items.
        earlier = None if cached is None else cached.allowed
        bits = packed_rows(self.filters.evaluate(tree)) if earlier is None else earlier.bits
        changed = items.log.allowed(tree, items.num_records)[items.record_places]
        allowed = AllowedItems(bits, items.num_rows, items.record_rows, changed, earlier)
        within = allowed
        if self.shown is not None:
            within = AllowedItems.of(allowed.mask() & self.shown.mask())
        within.leaves(self.trie)  # computed here to keep the work off the engine's thread
        self.filter_cache.put(
            key, CachedFilter(weakref.ref(items), weakref.ref(self.trie), allowed, within)
        )
        return within

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

    def caps(self, diversity: Diversity | None) -> tuple[Cap, ...]:
        """Translates a request's `diversity` into caps; None sets no caps.

        Raises:
            InvalidRequest: If the prefix level or a column does not exist.
        """
        caps: list[Cap] = []
        if diversity is None:
            return ()
        # Indexes are built here to keep the work off the engine's thread.
        if diversity.category is not None:
            caps.append(self._cap(GroupBy(CATEGORIES), diversity.category))
        for place, cap in enumerate(diversity.caps):
            try:
                by = self.filters.group_by(cap.field, cap.level)
            except FilterError as error:
                where = f"diversity.caps[{place}].{error.param}"
                raise InvalidRequest(where, str(error)) from None
            caps.append(self._cap(by, cap.most))
        if diversity.prefix is not None:
            level, limit = diversity.prefix
            if level >= (levels := self.trie.num_levels):
                raise InvalidRequest(
                    "diversity.prefix", f"expected a level of 0 to {levels - 1}, got {level}"
                )
            caps.append(Cap(PrefixGroups(self.trie, level), limit))
        return tuple(caps)

    def _cap(self, by: GroupBy, limit: int) -> Cap:
        return Cap(VersionGroups(self.items, self.groupings.of(by)), limit)

    def answerable(self, rows: np.ndarray) -> np.ndarray:
        """Returns [n] bool: True for rows that exist in this version and are not hidden."""
        exist = (rows >= 0) & (rows < self.num_items)
        return np.asarray(exist & ~are_among(rows, self.hidden))

    def read_list(self, name: str, count: int) -> np.ndarray:
        """Returns `count` rows of one of LISTS, best first; fewer if the catalogue has fewer.

        Items that have not begun or have ended are among them, items that are hidden are not.
        """
        looked_at = count
        while True:
            if name == POPULAR:
                self.popularity.extend(self.num_items)
                head = self.popularity.best(looked_at)
                rows = self.items.present_rows(head)
            else:
                head = self.items.newest(looked_at)
                rows = head[~self.items.are_removed(head)]
            if rows.size >= count or head.size < looked_at:
                return np.asarray(rows[:count])
            looked_at *= SCAN_GROWTH

    def list_allowed(
        self, name: str, count: int, excluded: np.ndarray, allowed: AllowedItems | None
    ) -> np.ndarray:
        """Returns up to `count` rows of a list that are allowed and not excluded.

        Args:
            name: One of LISTS.
            count: Number of rows.
            excluded: Item rows in any order; repetitions are allowed.
            allowed: Items to choose from; None allows all.

        Returns:
            Item rows, best first.
        """
        # At most X of the first count + X rows are excluded. More are looked at if a filter or the
        # time leaves too few.
        looked_at = count + excluded.size
        while True:
            head = self.read_list(name, looked_at)
            rows = head[~np.isin(head, excluded) & ~are_among(head, self.outside)]
            if allowed is not None:
                rows = rows[allowed.at(rows)]
            if rows.size >= count or head.size < looked_at:
                return np.asarray(rows[:count])
            looked_at *= SCAN_GROWTH

    def item_popularity(self, row: int) -> float:
        """Returns the decayed number of events of a row's item, to a tenth."""
        (count,) = self.popularity.at(self.items.first_rows(np.array([row]))).tolist()
        return round(float(count), 1)


def _find_superseded(items: CatalogVersion) -> np.ndarray:
    """Returns the later rows of a version of several servers whose item has another row now.

    A server that began with a snapshot of the log never had them, so no score may depend on them.
    """
    if not items.epoch:
        return NO_ROWS
    rows = items.removed_rows[items.successors >= 0]
    return np.asarray(rows[rows >= len(items.base)])


def _join(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the ascending rows of two ascending lists."""
    return one if not other.size else np.union1d(one, other)


@dataclass(frozen=True)
class CachedFilter:
    """The items that a filter allows in the catalogue version that used it last.

    Attributes:
        items: The version. The weak reference is dead once the version has been freed.
        trie: The version's trie, also a weak reference.
        allowed: Items that the filter allows.
        within: Those of them that requests get, with their trie leaves. It differs from `allowed`
            only if very many items are hidden.
        absent: Values of the filter that no item has; None before a request needs them.
    """

    items: weakref.ref[CatalogVersion]
    trie: weakref.ref[Trie]
    allowed: AllowedItems
    within: AllowedItems
    absent: tuple[AbsentValue, ...] | None = None


class FilterCache:
    """A thread-safe LRU cache of filters with a bound on its size in bytes.

    The size of an entry is the sum of three parts:

    - its key;
    - its bitmaps: 3/8 byte per item of the catalogue and 17 bytes per changed item;
    - ENTRY_BYTES.

    Attributes:
        capacity_bytes: Upper bound on the size of all entries.
        num_bytes: Size of all entries.
    """

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, tuple[CachedFilter, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> CachedFilter | None:
        """Returns the cached filter of a key, of any catalogue version; None if there is none."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: bytes, entry: CachedFilter) -> None:
        """Inserts or replaces an entry, then evicts the least recently used ones."""
        size = len(key) + entry.allowed.num_bytes + ENTRY_BYTES
        if entry.within is not entry.allowed:
            size += entry.within.num_bytes
        with self._lock:
            if key in self._entries:
                self.num_bytes -= self._entries.pop(key)[1]
            self._entries[key] = entry, size
            self.num_bytes += size
            while self.num_bytes > self.capacity_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._entries)
