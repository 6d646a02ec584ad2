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

from recserve.kernels.trie.trie import Trie
from recserve.kernels.trie.trie_insertion import overlay_trie
from recserve.kernels.trie.trie_overlay import Grown, TrieOverlay
from recserve.kernels.trie.trie_view import TrieView

NOWHERE = 2**62  # greater than every node number and leaf rank
SEARCHED = 2
CAPACITY = 16_384  # inserted ids; a service folds them into a new base from half as many on


class FixedTrie:
    """A trie with fixed addresses that holds one catalogue version at a time.

    Attributes:
        trie: What a captured search reads. Its `children`, `places`, `leaves`, `codes_of` and
            `any_leaf` are those of the loaded version; its other members are not valid.
        widths: Padded number of children of a node of each level.
    """

    def __init__(self, base: Trie, capacity: int = CAPACITY) -> None:
        """Allocates the buffers. capacity: the most ids that a version may have inserted."""
        levels, device = base.num_levels, base.device

        def place(count: int, fill: int = 0) -> Tensor:
            return torch.full((count,), fill, device=device)

        touched = (levels + 1) * capacity + 1
        grown = Grown(place(touched, NOWHERE), *(place(touched) for _ in range(4)))
        nothing = torch.empty(0, levels, dtype=torch.int64, device=device)
        self._nothing = overlay_trie(base, nothing, nothing[:, 0], base.num_rows)
        self.base = base
        self.trie = replace(
            self._nothing,
            grown=grown,
            codes=place(levels * capacity),
            inserted=place(capacity, NOWHERE),
        )
        sizes = zip(base.widths, base.codebook_sizes, strict=True)
        # Twice the base's widths, so that a version may have more children.
        self.widths = tuple(min(2 * width, size) for width, size in sizes)
        self._loaded: weakref.ref[TrieView] = weakref.ref(base)

    def holds(self, version: TrieView) -> bool:
        """Returns whether a version has this base and its changes fit into the buffers."""
        if version.base is not self.base:
            return False
        if version.overlay is None:
            return True
        sizes = zip(_sizes(version.overlay), _sizes(self.trie), strict=True)
        widths = zip(version.widths, self.widths, strict=True)
        return all(size <= most for size, most in (*sizes, *widths))

    def load(self, version: TrieView) -> None:
        """Copies a version into the buffers for the next searches. `holds` must be true for it."""
        if self._loaded() is version:
            return
        own = version.overlay or self._nothing
        columns = zip(_columns(self.trie), _columns(own), strict=True)
        for number, (place, column) in enumerate(columns):
            count = column.shape[0]
            place[:count].copy_(column)
            place[count:].fill_(NOWHERE if number < SEARCHED else 0)
        self._loaded = weakref.ref(version)


def _columns(trie: TrieOverlay) -> list[Tensor]:
    """Returns the overlay's arrays that a search reads; the first SEARCHED ones are ascending."""
    grown = trie.grown
    own = [grown.first, grown.last, grown.child_first, grown.child_count, trie.codes]
    return [grown.nodes, trie.inserted, *own]


def _sizes(trie: TrieOverlay) -> list[int]:
    return [column.shape[0] for column in _columns(trie)]
