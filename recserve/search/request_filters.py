"""Filters of the requests that are searched together, as the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recserve.kernels.trie.leaf_filter import LeafFilter
from recserve.kernels.trie.trie_children import Allowed, ChildFilter, counted
from recserve.kernels.trie.trie_view import TrieView


@dataclass(frozen=True)
class RequestFilters:
    """Filters of B requests over one trie. each: None: the request allows everything."""

    trie: TrieView
    each: tuple[LeafFilter | None, ...]

    @cached_property
    def left(self) -> ChildFilter:
        """As lists where they say it, else as bits; made once per search."""
        if all(f is None for f in self.each):
            return ChildFilter()
        if all(f is None or f.all for f in self.each):
            return ChildFilter(self._excluded().int())
        return ChildFilter(allowed=self.in_bits())

    def in_bits(self) -> Allowed:
        """As bits of the base's leaves, what is excluded and added already in them, and a list of
        the later leaves; in a few operators, however many requests.
        """
        trie, inserted = self.trie, self._inserted
        place = (trie.base.num_items // 32 + 1,)
        everything = torch.full(place, -1, dtype=torch.int32, device=trie.device)
        words, added = [], []
        for f in self.each:
            if f is None or f.all:
                words.append(everything)
                added.append(inserted)
            else:
                words.append(everything.new_zeros(place) if f.bits is None else f.bits.words[0])
                added.append(inserted[:0] if f.added is None else f.added)
        bits, excluded = torch.stack(words), self._excluded()
        more = self._padded(added)
        is_later = self._flip(bits, more, 1)
        self._flip(bits, excluded, -1)
        if not inserted.shape[0]:
            return Allowed(counted(bits))
        kept = more.masked_fill(~is_later | _among(more, excluded), trie.num_items)
        return Allowed(counted(bits), kept.sort().values[:, : inserted.shape[0]])

    def _flip(self, words: Tensor, ranks: Tensor, sign: int) -> Tensor:
        """Add or take the bits of leaves, in place, as far as the base has them; [B, n] bool: of
        which it has none. words [B, m], ranks [B, n], each once.
        """
        below = torch.searchsorted(self._inserted, ranks)
        is_later = torch.searchsorted(self._inserted, ranks, right=True) > below
        at = ranks - below
        bits = (1 << (at & 31).int()).masked_fill(is_later | (ranks >= self.trie.num_items), 0)
        words.scatter_add_(1, (at >> 5).clamp(max=words.shape[1] - 1), sign * bits)
        return is_later

    @cached_property
    def _inserted(self) -> Tensor:
        """Ascending leaf ranks that the base does not have."""
        overlay, device = self.trie.overlay, self.trie.device
        if overlay is None:
            return torch.empty(0, dtype=torch.int64, device=device)
        return overlay.inserted_ranks

    def _excluded(self) -> Tensor:
        nothing = torch.empty(0, dtype=torch.int64, device=self.trie.device)
        return self._padded(
            [torch.cat([nothing, *(f.excluded if f else ())]).sort().values for f in self.each]
        )

    def _padded(self, ranks: Seq[Tensor]) -> Tensor:
        return pad_sequence(list(ranks), batch_first=True, padding_value=self.trie.num_items)


def _among(ranks: Tensor, ascending: Tensor) -> Tensor:
    """[B, n] bool: which of the ranks [B, n] are in the lists [B, m]."""
    first = torch.searchsorted(ascending, ranks)
    return torch.searchsorted(ascending, ranks, right=True) > first
