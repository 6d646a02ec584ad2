"""A catalogue version at fixed addresses for graph replay: a base trie with capacity for changes.

A captured CUDA graph reads fixed addresses and has fixed shapes. A live catalogue has a new version
many times a second. So replays read the base in place. The few arrays that differ between versions
are copied into buffers with spare capacity, padded with nodes that no search finds.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import Tensor

from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.trie import ChangedNodes, Insertions, Trie

NOWHERE = 2**62  # greater than every node number and leaf rank
SEARCHED = 2
CAPACITY = 16_384  # inserted ids; a service folds them into a new base from half as many on


class FixedTrie:
    """A trie with fixed addresses that holds one catalogue version at a time.

    Attributes:
        trie: What a captured search reads. Its `children`, `child_columns`, `leaves`, `codes_of`
            and `any_leaf` are those of the loaded version. Its `widths` hold all versions. Other
            members are not valid.
    """

    def __init__(self, base: Trie, capacity: int = CAPACITY) -> None:
        """Allocates the buffers. capacity: the most ids that a version may have inserted."""
        levels, device = base.num_levels, base.device

        def place(count: int, fill: int = 0) -> Tensor:
            return torch.full((count,), fill, device=device)

        touched = (levels + 1) * capacity + 1
        changed = ChangedNodes(place(touched, NOWHERE), *(place(touched) for _ in range(4)))
        nothing = torch.empty(0, levels, dtype=torch.int64, device=device)
        unchanged = insert_items(base, nothing, nothing[:, 0], base.num_rows).insertions
        assert unchanged is not None
        self._unchanged = unchanged
        self._buffers = replace(
            unchanged,
            changed=changed,
            codes=place(levels * capacity),
            inserted=place(capacity, NOWHERE),
        )
        self.base = base
        self.trie = replace(base, insertions=self._buffers)
        sizes = zip(base.widths, base.codebook_sizes, strict=True)
        # Twice the base's widths, so that a version may have more children.
        vars(self.trie)["widths"] = tuple(min(2 * width, size) for width, size in sizes)
        self._loaded: weakref.ref[Trie] = weakref.ref(base)

    @property
    def capacity(self) -> int:
        """The most ids that a version may have inserted."""
        return self._buffers.inserted.shape[0]

    def holds(self, version: Trie) -> bool:
        """Returns whether a version has this base and its changes fit into the buffers."""
        if version.base is not self.base:
            return False
        if version.insertions is None:
            return True
        columns = zip(_columns(version.insertions), _columns(self._buffers), strict=True)
        widths = zip(version.widths, self.trie.widths, strict=True)
        fits = all(own.shape[0] <= place.shape[0] for own, place in columns)
        return fits and all(width <= most for width, most in widths)

    def load(self, version: Trie) -> None:
        """Copies a version into the buffers for the next searches. `holds` must be true for it."""
        if self._loaded() is version:
            return
        own = version.insertions or self._unchanged
        columns = zip(_columns(self._buffers), _columns(own), strict=True)
        for number, (place, column) in enumerate(columns):
            count = column.shape[0]
            place[:count].copy_(column)
            place[count:].fill_(NOWHERE if number < SEARCHED else 0)
        self._loaded = weakref.ref(version)


def _columns(own: Insertions) -> list[Tensor]:
    """Returns the arrays that a search reads; the first SEARCHED ones are ascending."""
    changed = own.changed
    later = [changed.first, changed.last, changed.child_first, changed.child_count, own.codes]
    return [changed.nodes, own.inserted, *later]
