"""The interface of a catalogue's trie for searches, with or without later changes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from recserve.kernels.trie.native_trie import NativeTrie
from recserve.kernels.trie.trie import Children, Leaves, Trie
from recserve.kernels.trie.trie_overlay import TrieOverlay


class TrieView(Protocol):
    """Trie of one catalogue version: `Trie`, or `TrieOverlay` once the catalogue has changed.

    Methods take nodes or rows of any shape unless said otherwise; results have the same shape.
    """

    @property
    def base(self) -> Trie:
        """The trie that was built; a `Trie` is its own base."""

    @property
    def overlay(self) -> TrieOverlay | None:
        """The changes since the base was built; None for a `Trie`."""

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """C of each level."""

    @property
    def num_levels(self) -> int:
        """L, including the disambiguation level."""

    @property
    def num_items(self) -> int:
        """I, the number of items (= leaves)."""

    @property
    def num_rows(self) -> int:
        """Item rows of the catalogue version; more than items where rows were replaced."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of base and overlay, including the empty prefix."""

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Number of nodes of each level, the empty prefix first."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Most children of a node of each level 0 : L, or an upper bound."""

    @property
    def closing_level(self) -> int:
        """The level, at least 1, from which fewer and fewer nodes have several items."""

    @property
    def any_leaf(self) -> int:
        """Any node of level L."""

    @property
    def device(self) -> torch.device:
        """Device of the arrays."""

    @property
    def leaf_rows(self) -> Tensor:
        """[I] item row at each leaf rank."""

    @property
    def native(self) -> NativeTrie:
        """Addresses for the C sources; on a CPU."""

    def num_children(self, nodes: Tensor) -> Tensor:
        """Returns the number of children of each node."""

    def codes_of(self, nodes: Tensor) -> Tensor:
        """Returns the last code of each node's prefix."""

    def parents_of(self, nodes: Tensor) -> Tensor:
        """Returns the node one code shorter."""

    def places(self, nodes: Tensor, parents: Tensor) -> Tensor:
        """Returns the column of each node in `children` of its parent."""

    def leaves(self, nodes: Tensor) -> Leaves:
        """Returns the leaf ranks under each node."""

    def base_leaves(self, nodes: Tensor) -> Leaves:
        """Returns the base's leaf ranks under each node; inserted leaves do not count."""

    def leaf_nodes(self, rows: Tensor) -> Tensor:
        """Returns the leaf node of each item row, -1 without one."""

    def leaf_ranks(self, rows: Tensor) -> Tensor:
        """Returns the leaf rank of each item row, -1 without one."""

    def children(self, nodes: Tensor, width: int | None = None) -> Children:
        """Returns all children of nodes [n], first those of the base.

        Args:
            nodes: [n].
            width: Pads to this many children without a host sync. None pads to the widest of the
                nodes.
        """

    def levels(self, nodes: Tensor) -> Tensor:
        """Returns the level of each node, 0 for the empty prefix."""

    def nodes_of_items(self, rows: Tensor) -> Tensor:
        """Returns the node [n, L] of each prefix of each item's semantic id. rows: [n]."""

    def items_of_leaves(self, nodes: Tensor) -> Tensor:
        """Returns the item row of each leaf node (a node of level L)."""


def gone_rows(trie: TrieView) -> Tensor | None:
    """Returns the item rows that must not be returned, or None if there are none."""
    return None if trie.overlay is None else trie.overlay.gone


def hidden_leaves(trie: TrieView) -> Tensor | None:
    """Returns the ascending leaf ranks of items that must not be returned, or None."""
    return None if trie.overlay is None else trie.overlay.hidden


def padding_of(trie: TrieView, level: int) -> int | None:
    """Returns the width to which children of a level's nodes are padded.

    A CPU pads to the widest of the given nodes, so the result is None. Other devices pad to the
    widest node of the level, so that the host does not wait for the device.
    """
    return None if trie.device.type == "cpu" else trie.widths[level]
