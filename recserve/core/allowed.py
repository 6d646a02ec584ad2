"""The items that a filter allows, in rows and as leaves of the trie, kept from version to version.

What it costs to go through the catalogue is paid once per filter and base trie: bits of the rows of
the bundle, and bits of the base's leaves. A version adds lists: of the leaves that came after the
base, that say something else of themselves by now, or are hidden. A request copies neither.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie import Trie
from recserve.kernels.trie.trie_children import LeafBits
from recserve.kernels.trie.trie_view import TrieView

NO_ROWS, NO_FLAGS = np.empty(0, np.int64), np.empty(0, bool)


@dataclass(frozen=True)
class BaseLeaves:
    """The allowed leaves of a base trie, which goes with its last version and not with this. rows
    ascending: those whose leaves may have been said otherwise than the rows' bits say.
    """

    trie: weakref.ref[Trie]
    bits: LeafBits
    rows: np.ndarray

    def contains(self, ranks: Tensor) -> Tensor:
        """[n] bool: whether leaves of the base are allowed. ranks [n]."""
        return (self.bits.words[0][ranks >> 5] >> (ranks & 31)) & 1 > 0


@dataclass(frozen=True)
class AllowedLeaves:
    """Leaves of a trie: those of the bits and those added, without the removed, which are of the
    bits. added, removed: ascending ranks int64; hidden items are in neither, or removed.
    """

    trie: weakref.ref[TrieView]
    base: BaseLeaves
    added: Tensor
    removed: Tensor


class AllowedItems:
    """Item rows that a request allows, out of num_rows of its catalogue version."""

    def __init__(
        self,
        bits: np.ndarray,
        num_rows: int,
        rows: np.ndarray = NO_ROWS,
        flags: np.ndarray = NO_FLAGS,
        earlier: AllowedItems | None = None,
    ) -> None:
        """bits [n / 8] uint8, of the first rows, no others are allowed but by `said` [m] bool,
        which counts for the ascending rows [m]. earlier: the same filter in another version, with
        the same bits.
        """
        self.num_rows = num_rows
        self.bits, self._rows, self._flags = bits, rows, flags
        self._base: BaseLeaves | None = None if earlier is None else earlier._base
        self._leaves: AllowedLeaves | None = None

    @staticmethod
    def of(allowed: np.ndarray) -> AllowedItems:
        """allowed: bool over all item rows."""
        return AllowedItems(packed_rows(allowed), len(allowed))

    def at(self, rows: np.ndarray) -> np.ndarray:
        """Whether item rows are allowed. rows: any shape; same shape back, whatever of a row that
        there is not.
        """
        place = np.clip(rows >> 3, 0, self.bits.size - 1)
        allowed = (self.bits[place] >> (rows & 7).astype(np.uint8)) & 1 > 0
        allowed &= rows >> 3 == place
        if self._rows.size:
            at = np.minimum(np.searchsorted(self._rows, rows), self._rows.size - 1)
            allowed = np.where(self._rows[at] == rows, self._flags[at], allowed)
        return np.asarray(allowed)

    def mask(self) -> np.ndarray:
        """[num_rows] bool."""
        mask = np.zeros(self.num_rows, dtype=bool)
        known = min(self.num_rows, 8 * self.bits.size)
        mask[:known] = np.unpackbits(self.bits, count=known, bitorder="little")
        mask[self._rows] = self._flags
        return mask

    @cached_property
    def count(self) -> int:
        """Allowed rows, hidden ones too."""
        return int(np.count_nonzero(self.mask()))

    @property
    def num_bytes(self) -> int:
        """What it holds, the part that other versions share included."""
        held = self.bits.nbytes + self._rows.nbytes + self._flags.nbytes
        if self._base is not None:
            held += 2 * self._base.bits.words.nbytes
        if self._leaves is not None:
            held += self._leaves.added.nbytes + self._leaves.removed.nbytes
        return held

    def leaves(self, trie: TrieView) -> AllowedLeaves:
        """The allowed leaves of the version's trie; made once.

        Raises ValueError for a trie of another number of rows.
        """
        found = self._leaves
        if found is None or found.trie() is not trie:
            self._leaves = found = self._leaves_of(trie)
        return found

    def _leaves_of(self, trie: TrieView) -> AllowedLeaves:
        if self.num_rows != trie.num_rows:
            raise ValueError(
                f"allowed is of {self.num_rows} rows; the catalogue has {trie.num_rows} items"
            )
        base = self._base
        if base is None or base.trie() is not trie.base:
            self._base = base = self._base_leaves(trie.base)
        rows = self._changed_rows(trie, base)
        nodes = trie.leaf_nodes(on_device(rows, trie.device))
        now = on_device(self.at(rows), trie.device)
        if trie.overlay is not None and trie.overlay.hidden is not None:
            nodes = torch.cat([nodes, trie.overlay.hidden_nodes])
            now = torch.cat([now, now.new_zeros(trie.overlay.hidden.shape[0])])
        inside = (nodes >= 0) & (nodes < trie.base.num_nodes)
        was = inside & base.contains(torch.where(inside, nodes - trie.any_leaf, 0))
        changed = (nodes >= 0) & (now != was)
        ranks, is_added = trie.leaves(nodes[changed]).first.long(), now[changed]
        added, removed = torch.unique(ranks[is_added]), torch.unique(ranks[~is_added])
        return AllowedLeaves(weakref.ref(trie), base, added, removed)

    def _base_leaves(self, base: Trie) -> BaseLeaves:
        """Goes through the catalogue, once per base."""
        bits = self.bits
        if self._rows.size or 8 * bits.size < base.num_rows:
            mask = self.mask()
            bits = packed_rows(np.pad(mask, (0, max(0, base.num_rows - len(mask)))))
        return BaseLeaves(weakref.ref(base), dispatch.leaf_bits(bits, base.leaf_items), self._rows)

    def _changed_rows(self, trie: TrieView, base: BaseLeaves) -> np.ndarray:
        """[n] rows that are not gone and whose leaves may be allowed otherwise than the base says,
        repeats among them.
        """
        parts = [self._rows]
        if base.rows is not self._rows:
            parts.append(base.rows)
        if trie.overlay is not None:
            parts.append(trie.overlay.changed_rows.cpu().numpy())
        rows = np.concatenate(parts)
        return np.asarray(rows[~is_gone(trie, rows)])


def is_gone(trie: TrieView, rows: np.ndarray) -> np.ndarray:
    """[n] bool: rows that must not be returned, or whose semantic ids are others' now."""
    on_host = None if trie.overlay is None else trie.overlay.gone_on_host
    if on_host is None:
        return np.zeros(rows.shape, dtype=bool)
    gone = on_host.numpy()
    at = np.minimum(np.searchsorted(gone, rows), gone.size - 1)
    return np.asarray(gone[at] == rows)


def packed_rows(allowed: np.ndarray) -> np.ndarray:
    """[n] bool as [n / 8] uint8."""
    return np.asarray(np.packbits(allowed, bitorder="little"))
