"""An LRU cache of filters: the items that each filter allows, carried from version to version."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass

from recserve.core.allowed import AllowedItems
from recserve.features.catalog.catalog_version import CatalogVersion
from recserve.features.catalog.filters import AbsentValue
from recserve.kernels.trie.trie import Trie

CAPACITY_BYTES = 256 << 20
# Python objects and tensor headers of one entry: 2.9 kB, measured as growth of the process. For a
# filter over a small catalogue this is nearly the whole size.
ENTRY_BYTES = 3 << 10


@dataclass(frozen=True)
class CachedFilter:
    """The items that a filter allows in the catalogue version that used it last.

    Attributes:
        items: The version. The weak reference is dead once the version has been freed.
        trie: The version's trie, also a weak reference.
        allowed: Items and trie leaves that the filter allows.
        absent: Values of the filter that no item has; None before a request needs them.
    """

    items: weakref.ref[CatalogVersion]
    trie: weakref.ref[Trie]
    allowed: AllowedItems
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
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, key: bytes, entry: CachedFilter) -> None:
        """Inserts or replaces an entry, then evicts the least recently used ones."""
        size = len(key) + entry.allowed.num_bytes + ENTRY_BYTES
        with self._lock:
            if key in self._entries:
                self.num_bytes -= self._entries.pop(key)[1]
            self._entries[key] = entry, size
            self.num_bytes += size
            while self.num_bytes > self.capacity_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._entries)
