"""Filters that were asked for, as the items that they allow, from version to version."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass

from recserve.core.allowed import AllowedItems
from recserve.features.catalog.catalog_version import CatalogVersion
from recserve.kernels.trie.trie_view import TrieView

CAPACITY_BYTES = 256 << 20
# Python objects and tensor headers of one entry, measured as growth of the process: 2.9 kB. Of a
# filter over a small catalogue that is nearly all there is.
ENTRY_BYTES = 3 << 10


@dataclass(frozen=True)
class CachedFilter:
    """A filter's items in the version that it was last asked of, over the version's trie; both may
    be gone by now.
    """

    items: weakref.ref[CatalogVersion]
    trie: weakref.ref[TrieView]
    allowed: AllowedItems


class FilterCache:
    """The most recently used filters, within a bound in bytes; safe to use from several threads.

    An entry counts its key, what it holds of items and leaves (3/8 byte per item of the catalogue
    and 17 bytes per changed item), and ENTRY_BYTES.
    """

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, tuple[CachedFilter, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> CachedFilter | None:
        """What is kept of a filter, of whichever version."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, key: bytes, kept: CachedFilter) -> None:
        """Keep it in place of what was kept of the filter; those asked longest ago make room."""
        size = len(key) + kept.allowed.num_bytes + ENTRY_BYTES
        with self._lock:
            if key in self._entries:
                self.num_bytes -= self._entries.pop(key)[1]
            self._entries[key] = kept, size
            self.num_bytes += size
            while self.num_bytes > self.capacity_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._entries)
