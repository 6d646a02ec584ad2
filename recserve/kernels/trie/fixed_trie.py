"""A catalogue version where recorded steps read it: a base trie, and capacity for later changes.

A recorded step reads fixed addresses and has fixed shapes; versions of a live catalogue come many
times a second. So the base is read where it lies, and the few arrays by which a version differs are
copied to places with spare capacity, filled up with nodes that nothing finds.
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

NOWHERE = 2**62  # past every node number and leaf rank
SEARCHED = 2
CAPACITY = 16_384  # inserted ids; from half as many on a service folds them into a new base


class FixedTrie:
    """trie: what a recorded search reads: its `children`, `places`, `leaves`, `codes_of` and
    `any_leaf` are those of the version, the rest is of none. widths: to how many the children of a
    node of each level are padded there.
    """

    def __init__(self, base: Trie, capacity: int = CAPACITY) -> None:
        """capacity: ids that a version may have inserted."""
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
        # Twice as many as now, so that a version may have more.
        self.widths = tuple(min(2 * width, size) for width, size in sizes)
        self._loaded: weakref.ref[TrieView] = weakref.ref(base)

    def holds(self, version: TrieView) -> bool:
        """Whether a version stands on this base and its changes fit."""
        if version.base is not self.base:
            return False
        if version.overlay is None:
            return True
        sizes = zip(_sizes(version.overlay), _sizes(self.trie), strict=True)
        widths = zip(version.widths, self.widths, strict=True)
        return all(size <= most for size, most in (*sizes, *widths))

    def load(self, version: TrieView) -> None:
        """Let recorded searches read this version, which fits."""
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
    """What a search reads of what came later; the first, SEARCHED ones in ascending order."""
    grown = trie.grown
    own = [grown.first, grown.last, grown.child_first, grown.child_count, trie.codes]
    return [grown.nodes, trie.inserted, *own]


def _sizes(trie: TrieOverlay) -> list[int]:
    return [column.shape[0] for column in _columns(trie)]
