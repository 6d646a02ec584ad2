"""Filters of requests, as leaves of the trie.

Beam search never enters a subtree without allowed leaves. Items that the catalogue version hides
are filtered in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recserve.core.allowed import AllowedItems, is_removed
from recserve.core.request import SlateQuery
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie import BatchFilter, LeafFilter, Trie, count_leaves

NO_ROWS = np.empty(0, np.int64)


def leaf_filter(
    trie: Trie, excluded: np.ndarray | None, allowed: AllowedItems | None
) -> LeafFilter | None:
    """Returns the filter of one request, None if it allows everything.

    The cost grows with the excluded rows only, if the leaves of `allowed` were computed before.

    Args:
        trie: Trie of the catalogue version.
        excluded: [X] item rows, repeats allowed. None: none.
        allowed: Items of the same version. None allows all.

    Raises:
        ValueError: If a row is outside the catalogue, or `allowed` belongs to another version.
    """
    _check(trie, excluded)
    leaves = None if allowed is None else allowed.leaves(trie)
    hidden = trie.removed_leaves if leaves is None else leaves.removed
    lists = () if hidden is None or not hidden.shape[0] else (hidden,)
    if excluded is not None and excluded.size:
        rows = np.unique(excluded)
        present = ~is_removed(trie, rows)
        if allowed is not None:
            present &= allowed.at(rows)
        lists = (*lists, _ranks(trie, rows[present]))
    if leaves is not None:
        return LeafFilter(lists, leaves.base.bits, leaves.added)
    return LeafFilter(lists) if lists else None


def excluded_ranks(trie: Trie, lists: Seq[np.ndarray | None], past: int) -> Tensor | None:
    """Returns the leaves that requests without a bitmap exclude, as one table.

    The number of operators does not depend on the number of requests.

    Args:
        trie: Trie of the catalogue version.
        lists: Excluded item rows of each request, as in `leaf_filter`.
        past: Padding value, larger than any leaf rank.

    Returns:
        [B, X] int64 ascending leaf ranks without repeats, padded. None if no leaf is excluded.

    Raises:
        ValueError: As in `leaf_filter`.
    """
    # -1 pads the table; `past` replaces it, so that padding sorts to the end.
    hidden = trie.removed_leaves
    own = [NO_ROWS if rows is None else np.unique(rows) for rows in lists]
    width = max(rows.size for rows in own)
    if not width and hidden is None:
        return None
    table = np.full((len(own), width), -1, np.int64)
    for row, rows in zip(table, own, strict=True):
        _check(trie, rows)
        row[: rows.size] = rows
    device_rows = on_device(table, trie.device)
    ranks = trie.leaf_ranks(device_rows.clamp(min=0)).long()
    ranks = torch.where((device_rows >= 0) & (ranks >= 0), ranks, past)
    if hidden is not None:
        ranks = torch.cat([ranks, hidden.expand(len(own), -1)], dim=1).sort(1).values
        # A leaf may be both hidden and excluded: blank the repeats.
        ranks[:, 1:] = torch.where(ranks[:, 1:] == ranks[:, :-1], past, ranks[:, 1:])
    return ranks.sort(1).values


def _check(trie: Trie, excluded: np.ndarray | None) -> None:
    if excluded is None or not excluded.size:
        return
    low, high = int(excluded.min()), int(excluded.max())
    if low < 0 or high >= trie.num_rows:
        raise ValueError(
            f"excluded rows span {low}..{high}; the catalogue has {trie.num_rows} rows"
        )


def _ranks(trie: Trie, rows: np.ndarray) -> Tensor:
    """Returns ascending leaf ranks of item rows, `num_items` for a row without a leaf."""
    ranks = trie.leaf_ranks(on_device(rows, trie.device, torch.int64)).long()
    return torch.where(ranks >= 0, ranks, trie.num_items).sort().values


def usable_items(requests: Seq[SlateQuery], items: int, device: torch.device) -> Tensor | None:
    """Returns [B, I] bool: the items that each request and the catalogue allow. None: all items."""
    gone = requests[0].trie.removed_rows
    open_ = all(r.allowed is None and (r.excluded is None or not r.excluded.size) for r in requests)
    if open_ and gone is None:
        return None
    usable = torch.ones(len(requests), items, dtype=torch.bool, device=device)
    for b, request in enumerate(requests):
        if request.allowed is not None:
            usable[b] = on_device(request.allowed.mask(), device)
        if request.excluded is not None:
            usable[b].index_fill_(0, on_device(request.excluded, device, torch.int64), False)
    if gone is not None:
        usable.index_fill_(1, gone, False)
    return usable


@dataclass(frozen=True)
class RequestFilters:
    """Filters of B requests over one trie.

    Attributes:
        trie: Trie of the catalogue version.
        each: Filter of each request. None: the request allows everything.
    """

    trie: Trie
    each: tuple[LeafFilter | None, ...]

    @cached_property
    def batch(self) -> BatchFilter:
        """The filters as lists of excluded leaves if possible, otherwise as bitmaps."""
        if all(f is None for f in self.each):
            return BatchFilter()
        if all(f is None or f.all for f in self.each):
            return BatchFilter(self._list_excluded().int())
        return self.in_bits()

    def in_bits(self) -> BatchFilter:
        """Returns the filters as bitmaps over the leaves of the base, and a list of later leaves.

        Excluded and added leaves are already applied to the bitmaps. Few operators are needed,
        whatever the number of requests.
        """
        trie, inserted = self.trie, self._inserted_ranks
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
        bits, excluded = torch.stack(words), self._list_excluded()
        more = self._pad(added)
        is_later = self._flip(bits, more, 1)
        self._flip(bits, excluded, -1)
        if not inserted.shape[0]:
            return BatchFilter(bits=count_leaves(bits))
        later = more.masked_fill(~is_later | _among(more, excluded), trie.num_items)
        return BatchFilter(
            bits=count_leaves(bits), added=later.sort().values[:, : inserted.shape[0]]
        )

    def _flip(self, words: Tensor, ranks: Tensor, sign: int) -> Tensor:
        """Adds (sign 1) or removes (sign -1) leaves in bitmaps, in place.

        Args:
            words: [B, m] int32 bitmaps.
            ranks: [B, n] leaf ranks, without repeats.
            sign: 1 or -1.

        Returns:
            [B, n] bool: leaves that the base lacks. Their bits do not change.
        """
        # Inserted leaves before a rank shift it: subtract them to get the rank in the base.
        below = torch.searchsorted(self._inserted_ranks, ranks)
        is_later = torch.searchsorted(self._inserted_ranks, ranks, right=True) > below
        at = ranks - below
        # Leaf r of the base is bit r & 31 of word r >> 5. Adding sets a bit that is clear.
        bits = (1 << (at & 31).int()).masked_fill(is_later | (ranks >= self.trie.num_items), 0)
        words.scatter_add_(1, (at >> 5).clamp(max=words.shape[1] - 1), sign * bits)
        return is_later

    @cached_property
    def _inserted_ranks(self) -> Tensor:
        """Ascending leaf ranks that the base lacks."""
        if (later := self.trie.insertions) is not None:
            return later.ranks
        return torch.empty(0, dtype=torch.int64, device=self.trie.device)

    def _list_excluded(self) -> Tensor:
        nothing = torch.empty(0, dtype=torch.int64, device=self.trie.device)
        return self._pad(
            [torch.cat([nothing, *(f.excluded if f else ())]).sort().values for f in self.each]
        )

    def _pad(self, ranks: Seq[Tensor]) -> Tensor:
        return pad_sequence(list(ranks), batch_first=True, padding_value=self.trie.num_items)


def _among(ranks: Tensor, ascending: Tensor) -> Tensor:
    """Returns [B, n] bool: which of the ranks [B, n] are in the ascending lists [B, m]."""
    first = torch.searchsorted(ascending, ranks)
    return torch.searchsorted(ascending, ranks, right=True) > first
