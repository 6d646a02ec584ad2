"""An immutable map from keys to item rows, whose versions share their common entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Generic, TypeVar

K = TypeVar("K")
MAX_RECENT = 1024


@dataclass(frozen=True)
class RowMap(Generic[K]):
    """Three layers of rows by key. A later layer overrides an earlier one, and -1 means no row.

    A change copies `recent` only. Once `recent` exceeds 1024 entries, it is merged into a copy of
    `older`.

    Attributes:
        base: Rows of the bundle.
        older: Changes that were merged.
        recent: Latest changes, at most 1024.
    """

    base: Mapping[K, int]
    older: Mapping[K, int] = field(default_factory=dict)
    recent: Mapping[K, int] = field(default_factory=dict)

    def get(self, key: K) -> int:
        """Returns the row of a key, or -1."""
        return self.recent.get(key, self.older.get(key, self.base.get(key, -1)))

    def get_many(self, keys: Iterable[K]) -> list[int]:
        """Returns the row of each key, or -1."""
        keys = list(keys)
        found: Iterable[int] = map(self.base.get, keys, repeat(-1))
        for layer in (self.older, self.recent):
            if layer:
                found = map(layer.get, keys, found)
        return list(found)

    def with_rows(self, changes: Mapping[K, int]) -> RowMap[K]:
        """Returns a map with changed rows."""
        recent = {**self.recent, **changes}
        if len(recent) <= MAX_RECENT:
            return RowMap(self.base, self.older, recent)
        return RowMap(self.base, {**self.older, **recent})
