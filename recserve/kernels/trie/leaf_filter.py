"""Which leaves of a trie a request allows, counted at every prefix.

Leaves are numbered in trie order, so the items under a prefix are a range of leaf ranks and the
allowed ones among them are a difference of two counts. A filter is in two parts: bits of the base's
leaves, which all requests that ask the same share, in every version over that base; and lists of
the few leaves of which a version or a request says something else.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recserve.kernels.trie.trie_children import LeafBits


@dataclass(frozen=True)
class LeafFilter:
    """Allowed leaves: all, or those of `bits` and `added`, without the excluded ones.

    excluded: ascending ranks int64 of leaves that are allowed otherwise, in lists that have no leaf
    in common; a row without a leaf has the number of items there. bits: one row, of the base's
    leaves. added: ascending ranks int64 of leaves that are allowed beside those. Without both, all
    leaves are allowed but the excluded ones; without bits, those added.
    """

    excluded: tuple[Tensor, ...] = ()
    bits: LeafBits | None = None
    added: Tensor | None = None

    @property
    def all(self) -> bool:
        """Whether all leaves are allowed but the excluded ones."""
        return self.bits is None and self.added is None
