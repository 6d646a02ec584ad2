"""Allowed items of a filter, as item rows and as leaves of the trie.

A pass over the whole catalogue happens once per filter and base trie. Its results are two bitmaps:
one over the item rows of the bundle, and one over the leaves of the base trie. A later catalogue
version adds short lists of leaves that are new, changed or hidden since the base. A request copies
neither the bitmaps nor the lists.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.kernels.trie.level_search import leaf_bits
from recserve.kernels.trie.trie import LeafBits, Trie

NO_ROWS, NO_FLAGS = np.empty(0, np.int64), np.empty(0, bool)


@dataclass(frozen=True)
class BaseLeaves:
    """The allowed leaves of a base trie.

    Attributes:
        trie: The base trie. The reference is weak: the base lives as long as its last version.
        bits: Bitmap over the leaves of the base.
        rows: [n] int64 ascending item rows whose flags may differ from the bitmap over the rows.
    """

    trie: weakref.ref[Trie]
    bits: LeafBits
    rows: np.ndarray

    def contains(self, ranks: Tensor) -> Tensor:
        """Returns [n] bool: whether the base leaves with ranks [n] are allowed."""
        return (self.bits.words[0][ranks >> 5] >> (ranks & 31)) & 1 > 0


@dataclass(frozen=True)
class AllowedLeaves:
    """The allowed leaves of a trie: those in the base bitmap or in `added`, except `removed`.

    Hidden items are never in `added`. They are in `removed` if the bitmap holds them.

    Attributes:
        trie: The trie of the catalogue version. The reference is weak.
        base: Allowed leaves of the base trie.
        added: [a] int64 ascending ranks of allowed leaves outside the bitmap.
        removed: [r] int64 ascending ranks of leaves in the bitmap that are not allowed.
    """

    trie: weakref.ref[Trie]
    base: BaseLeaves
    added: Tensor
    removed: Tensor


class AllowedItems:
    """Item rows that a filter allows, out of `num_rows` rows of one catalogue version."""

    def __init__(
        self,
        bits: np.ndarray,
        num_rows: int,
        rows: np.ndarray = NO_ROWS,
        flags: np.ndarray = NO_FLAGS,
        earlier: AllowedItems | None = None,
    ) -> None:
        """Makes the set from a bitmap and exceptions to it.

        Args:
            bits: [n / 8] uint8 bitmap of the first rows, least significant bit first. Later rows
                are not allowed unless `flags` says so.
            num_rows: Item rows of the catalogue version.
            rows: [m] int64 ascending rows whose flags replace the bitmap's.
            flags: [m] bool, whether each of `rows` is allowed.
            earlier: The same filter for another version, with the same `bits`. Its leaves of the
                base trie are reused.
        """
        self.num_rows = num_rows
        self.bits, self._rows, self._flags = bits, rows, flags
        self._base: BaseLeaves | None = None if earlier is None else earlier._base
        self._leaves: AllowedLeaves | None = None

    @staticmethod
    def of(allowed: np.ndarray) -> AllowedItems:
        """Returns the set of the rows that are True in `allowed`, [num_rows] bool."""
        return AllowedItems(packed_rows(allowed), len(allowed))

    def at(self, rows: np.ndarray) -> np.ndarray:
        """Returns whether item rows are allowed.

        Args:
            rows: int64 item rows of any shape.

        Returns:
            bool of the same shape. The value is undefined for a row outside the catalogue.
        """
        # Row r is bit r & 7 of byte r >> 3; rows past the bitmap are not allowed.
        place = np.clip(rows >> 3, 0, self.bits.size - 1)
        allowed = (self.bits[place] >> (rows & 7).astype(np.uint8)) & 1 > 0
        allowed &= rows >> 3 == place
        if self._rows.size:
            at = np.minimum(np.searchsorted(self._rows, rows), self._rows.size - 1)
            allowed = np.where(self._rows[at] == rows, self._flags[at], allowed)
        return np.asarray(allowed)

    def mask(self) -> np.ndarray:
        """Returns the set as [num_rows] bool."""
        mask = np.zeros(self.num_rows, dtype=bool)
        known = min(self.num_rows, 8 * self.bits.size)
        mask[:known] = np.unpackbits(self.bits, count=known, bitorder="little")
        mask[self._rows] = self._flags
        return mask

    @cached_property
    def count(self) -> int:
        """Number of allowed rows, hidden ones included."""
        return int(np.count_nonzero(self.mask()))

    @property
    def num_bytes(self) -> int:
        """Bytes that the set holds, including the part that it shares with other versions."""
        held = self.bits.nbytes + self._rows.nbytes + self._flags.nbytes
        if self._base is not None:
            held += 2 * self._base.bits.words.nbytes
        if self._leaves is not None:
            held += self._leaves.added.nbytes + self._leaves.removed.nbytes
        return held

    def leaves(self, trie: Trie) -> AllowedLeaves:
        """Returns the allowed leaves of the version's trie, computed once per trie.

        Raises:
            ValueError: If the trie has another number of rows.
        """
        found = self._leaves
        if found is None or found.trie() is not trie:
            self._leaves = found = self._leaves_of(trie)
        return found

    def _leaves_of(self, trie: Trie) -> AllowedLeaves:
        if self.num_rows != trie.num_rows:
            raise ValueError(
                f"allowed covers {self.num_rows} item rows; the catalogue has {trie.num_rows}"
            )
        base = self._base
        if base is None or base.trie() is not trie.base:
            self._base = base = self._base_leaves(trie.base)
        rows = self._changed_rows(trie, base)
        nodes = trie.leaf_nodes(on_device(rows, trie.device))
        now = on_device(self.at(rows), trie.device)
        if trie.removed_rows is not None:
            nodes = torch.cat([nodes, trie.removed_nodes])
            now = torch.cat([now, now.new_zeros(trie.removed_nodes.shape[0])])
        # Compare the flag now with the base bitmap; only differences become list entries.
        inside = (nodes >= 0) & (nodes < trie.base.num_nodes)
        was = inside & base.contains(torch.where(inside, nodes - trie.any_leaf, 0))
        changed = (nodes >= 0) & (now != was)
        ranks, is_added = trie.leaves(nodes[changed]).first.long(), now[changed]
        added, removed = torch.unique(ranks[is_added]), torch.unique(ranks[~is_added])
        return AllowedLeaves(weakref.ref(trie), base, added, removed)

    def _base_leaves(self, base: Trie) -> BaseLeaves:
        """Returns the allowed leaves of a base trie, by a pass over the catalogue."""
        bits = self.bits
        if self._rows.size or 8 * bits.size < base.num_rows:
            mask = self.mask()
            bits = packed_rows(np.pad(mask, (0, max(0, base.num_rows - len(mask)))))
        return BaseLeaves(weakref.ref(base), leaf_bits(bits, base.leaf_items), self._rows)

    def _changed_rows(self, trie: Trie, base: BaseLeaves) -> np.ndarray:
        """Returns [n] rows whose leaves may differ from the base bitmap.

        Rows may repeat. Rows that are gone are left out.
        """
        parts = [self._rows]
        if base.rows is not self._rows:
            parts.append(base.rows)
        if trie.insertions is not None:
            parts.append(trie.insertions.changed_rows.cpu().numpy())
        rows = np.concatenate(parts)
        return np.asarray(rows[~is_removed(trie, rows)])


def is_removed(trie: Trie, rows: np.ndarray) -> np.ndarray:
    """Returns [n] bool: rows not to be returned, or whose semantic ids belong to others now."""
    on_host = None if trie.insertions is None else trie.insertions.removed_on_host
    if on_host is None:
        return np.zeros(rows.shape, dtype=bool)
    removed = on_host.numpy()
    at = np.minimum(np.searchsorted(removed, rows), removed.size - 1)
    return np.asarray(removed[at] == rows)


def packed_rows(allowed: np.ndarray) -> np.ndarray:
    """Returns [n] bool packed into [n / 8] uint8, least significant bit first."""
    return np.asarray(np.packbits(allowed, bitorder="little"))
