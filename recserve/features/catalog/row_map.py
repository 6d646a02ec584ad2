"""Key to item row, with changes: versions share what they have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Generic, TypeVar

K = TypeVar("K")
MAX_RECENT = 1024


@dataclass(frozen=True)
class RowMap(Generic[K]):
    """Immutable; -1 stands for no row. A later layer hides what an earlier one says.

    A change copies `recent` only, and every thousandth change copies `older` too.
    """

    base: Mapping[K, int]
    older: Mapping[K, int] = field(default_factory=dict)
    recent: Mapping[K, int] = field(default_factory=dict)

    def get(self, key: K) -> int:
        """Row of a key, -1 where there is none."""
        return self.recent.get(key, self.older.get(key, self.base.get(key, -1)))

    def get_many(self, keys: Iterable[K]) -> list[int]:
        """Row of each key, -1 where there is none."""
        keys = list(keys)
        found: Iterable[int] = map(self.base.get, keys, repeat(-1))
        for layer in (self.older, self.recent):
            if layer:
                found = map(layer.get, keys, found)
        return list(found)

    def with_rows(self, changes: Mapping[K, int]) -> RowMap[K]:
        """The same with these rows."""
        recent = {**self.recent, **changes}
        if len(recent) <= MAX_RECENT:
            return RowMap(self.base, self.older, recent)
        return RowMap(self.base, {**self.older, **recent})
