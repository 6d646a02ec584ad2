"""A catalogue version where recorded steps read it: a base trie, and room for what came after it.

A recorded step reads fixed addresses and has fixed shapes; versions of a live catalogue come many
times a second. So the base is read where it lies, and the few arrays by which a version differs are
copied to places with room to spare, filled up with nodes that nothing finds.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import Tensor

from recserve.kernels.trie import Trie
from recserve.kernels.trie_insertion import overlay_trie
from recserve.kernels.trie_overlay import AnyTrie, Grown, TrieOverlay

NOWHERE = 2**62  # past every node number and leaf rank
ROOM = 16_384  # inserted ids; from half as many on a service folds them into a new base


class FixedTrie:
    """trie: what a recorded search reads: its `children`, `places`, `leaves`, `codes_of` and
    `any_leaf` are those of the version, the rest is of none. widths: to how many the children of a
    node of each level are padded there. most_items: that a version may have.
    """

    def __init__(self, base: Trie, room: int = ROOM) -> None:
        """room: ids that a version may have inserted."""
        levels, device = base.num_levels, base.device

        def place(count: int, fill: int = 0) -> Tensor:
            return torch.full((count,), fill, device=device)

        touched = (levels + 1) * room + 1
        grown = Grown(place(touched, NOWHERE), *(place(touched) for _ in range(4)))
        nothing = torch.empty(0, levels, dtype=torch.int64, device=device)
        empty = overlay_trie(base, nothing, nothing[:, 0], base.num_rows)
        self.base = base
        self.trie = replace(
            empty, grown=grown, codes=place(levels * room), inserted=place(room, NOWHERE)
        )
        self.most_items = base.num_items + room
        sizes = zip(base.widths, base.codebook_sizes, strict=True)
        # Twice as many as now, so that a version may have more.
        self.widths = tuple(min(2 * width, size) for width, size in sizes)
        self._loaded: weakref.ref[AnyTrie] = weakref.ref(base)

    def holds(self, version: AnyTrie) -> bool:
        """Whether a version stands on this base and there is room for it."""
        if isinstance(version, Trie):
            return version is self.base
        if version.base is not self.base:
            return False
        sizes = zip(_sizes(version), _sizes(self.trie), strict=True)
        widths = zip(version.widths, self.widths, strict=True)
        return all(size <= most for size, most in (*sizes, *widths))

    def load(self, version: AnyTrie) -> None:
        """Let recorded searches read this version, which fits."""
        if self._loaded() is version:
            return
        own = None if isinstance(version, Trie) else version
        grown = self.trie.grown
        pairs = [(grown.nodes, NOWHERE), (self.trie.inserted, NOWHERE), (self.trie.codes, 0)]
        pairs += [(column, 0) for column in _ranges(grown)]
        columns: list[Tensor | None] = [None] * len(pairs)
        if own is not None:
            columns = [own.grown.nodes, own.inserted, own.codes, *_ranges(own.grown)]
        for (place, fill), column in zip(pairs, columns, strict=True):
            count = 0 if column is None else column.shape[0]
            if column is not None:
                place[:count].copy_(column)
            place[count:].fill_(fill)
        self._loaded = weakref.ref(version)


def _ranges(grown: Grown) -> list[Tensor]:
    return [grown.first, grown.last, grown.child_first, grown.child_count]


def _sizes(trie: TrieOverlay) -> tuple[int, int, int]:
    return trie.grown.nodes.shape[0], trie.inserted.shape[0], trie.codes.shape[0]
