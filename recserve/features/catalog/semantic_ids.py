"""Semantic ids of items: item ids, rows and codes mapped to each other, in compact arrays.

The trie over the same codes is in `recserve.kernels.trie.trie`; this file needs only numpy. A
million items of five levels take 26 MB, without the id strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class PackedRows:
    """Packed item rows of n lookups: result i is `rows[offsets[i] : offsets[i + 1]]`."""

    rows: np.ndarray
    offsets: np.ndarray

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[self.offsets[index] : self.offsets[index + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class CodeReport:
    """How well the codes of a quantiser separate items.

    Attributes:
        collision_share: Share of items whose quantiser codes another item has too.
        largest_collision: Most items on one code tuple.
        used: [L] share of codes in use, per quantiser level.
        perplexity: [L] exp(entropy) of the use of the codes, per quantiser level.
    """

    collision_share: float
    largest_collision: int
    used: tuple[float, ...]
    perplexity: tuple[float, ...]

    def lines(self) -> list[str]:
        """Returns the report as lines for a terminal."""
        if not self.collision_share:
            shared = "no two items share their codes"
        else:
            shared = (
                f"{self.collision_share:.1%} of the items share their codes with others, at most "
                f"{self.largest_collision} have the same; a last code tells them apart"
            )
        return [f"semantic ids: {shared}"] + [
            f"level {level}: {used:.1%} of the codes in use, as evenly as {even:.0f} equal ones"
            for level, (used, even) in enumerate(zip(self.used, self.perplexity, strict=True))
        ]


@dataclass(frozen=True)
class SemanticIds:
    """Semantic ids of I items.

    Attributes:
        item_ids: [I] item ids.
        codes: [I, L] uint16 distinct semantic ids, disambiguation level included.
        codebook_sizes: [L] codes of each level.
        has_disambiguation: True if the last level only separates items with equal quantiser codes.

    Raises:
        ValueError: If sizes do not fit, a code is out of range, or two items share a semantic id.
    """

    item_ids: Sequence[str]
    codes: np.ndarray
    codebook_sizes: tuple[int, ...]
    has_disambiguation: bool

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.dtype != np.uint16 or not self.codes.size:
            raise ValueError(
                f"codes are {self.codes.dtype} of shape {self.codes.shape}; expected uint16 [I, L]"
            )
        items, levels = self.codes.shape
        if len(self.item_ids) != items:
            raise ValueError(f"{len(self.item_ids)} item ids but codes of {items} items")
        if len(self.codebook_sizes) != levels:
            raise ValueError(
                f"codes have {levels} levels; {len(self.codebook_sizes)} codebook sizes"
            )
        highest = self.codes.max(axis=0)
        for level, size in enumerate(self.codebook_sizes):
            if highest[level] >= size:
                raise ValueError(
                    f"a code of level {level} is {highest[level]}; the codebook holds {size}"
                )
        ranked = self.codes[self.order]
        same = (ranked[1:] == ranked[:-1]).all(axis=1)
        if same.any():
            first = int(np.flatnonzero(same)[0])
            one, two = self.item_ids[self.order[first]], self.item_ids[self.order[first + 1]]
            raise ValueError(
                f"items {one!r} and {two!r} share a semantic id; add a level to separate them"
            )

    @property
    def num_items(self) -> int:
        """I, the number of items."""
        return int(self.codes.shape[0])

    @property
    def num_levels(self) -> int:
        """L, disambiguation level included."""
        return len(self.codebook_sizes)

    @cached_property
    def order(self) -> np.ndarray:
        """[I] int32 rows in lexicographic order of their codes."""
        return np.lexsort(self.codes.T[::-1]).astype(np.int32)

    def decode(self, codes: np.ndarray) -> PackedRows:
        """Returns the items under each code prefix, in lexicographic order of their semantic ids.

        Args:
            codes: [n, l] integer prefixes with 1 <= l <= L. A prefix of L codes has at most one
                item.

        Raises:
            ValueError: If the prefixes have another width.
        """
        if codes.ndim != 2 or not 1 <= codes.shape[1] <= self.num_levels:
            raise ValueError(f"codes have shape {codes.shape}; expected [n, 1..{self.num_levels}]")
        ends = self._bisect(np.concatenate([codes, codes]), np.repeat([False, True], len(codes)))
        first, last = ends[: len(codes)], ends[len(codes) :]
        counts = last - first
        offsets = np.concatenate([[0], np.cumsum(counts)])
        # The ranges first[i] .. last[i] - 1 of all prefixes, concatenated.
        places = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)
        return PackedRows(self.order[places], offsets)

    def _bisect(self, wanted: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Returns [n] positions of prefixes in `order`.

        A position is before all items with the prefix, or after them where `right` [n] is True.
        """
        # One binary search per prefix, all in step.
        low = np.zeros(len(wanted), dtype=np.int64)
        high = np.full(len(wanted), self.num_items, dtype=np.int64)
        while (open_ := low < high).any():
            middle = (low + high) // 2
            here = self.codes[self.order[np.where(open_, middle, 0)], : wanted.shape[1]]
            differs = here != wanted
            level = differs.argmax(axis=1)[:, None]
            less = np.take_along_axis(here < wanted, level, axis=1)[:, 0]
            ahead = np.where(differs.any(axis=1), less, right)
            low = np.where(open_ & ahead, middle + 1, low)
            high = np.where(open_ & ~ahead, middle, high)
        return low


def build_semantic_ids(
    item_ids: Sequence[str],
    codes: np.ndarray,
    codebook_sizes: tuple[int, ...],
    popularity: np.ndarray,
) -> tuple[SemanticIds, CodeReport]:
    """Makes the quantiser's codes distinct and reports their collisions.

    If items share a code tuple, a disambiguation level is appended. It numbers the items of a tuple
    from 0, most popular first, ties by row. Without collisions there is no such level.

    Args:
        item_ids: [I] item ids.
        codes: [I, L] uint16 codes of a quantiser.
        codebook_sizes: [L] codes of each level.
        popularity: [I] events per item.

    Raises:
        ValueError: If more than 65,536 items share a tuple.
    """
    # Items with equal codes become neighbours, most popular first.
    order = np.lexsort((np.arange(len(codes)), -popularity, *codes.T[::-1]))
    ranked = codes[order]
    opens = np.ones(len(codes), dtype=bool)
    opens[1:] = (ranked[1:] != ranked[:-1]).any(axis=1)
    starts = np.flatnonzero(opens)
    counts = np.diff(np.append(starts, len(codes)))
    largest = int(counts.max())
    if largest > 65_536:
        raise ValueError(
            f"{largest} items share one code tuple; at most 65536: use more levels or codes"
        )
    report = CodeReport(
        float(counts[counts > 1].sum() / len(codes)),
        largest,
        *_use(codes, codebook_sizes),
    )
    if largest > 1:
        extra = np.empty(len(codes), dtype=np.uint16)
        extra[order] = np.arange(len(codes)) - np.repeat(starts, counts)
        codes = np.concatenate([codes, extra[:, None]], axis=1)
        codebook_sizes = (*codebook_sizes, largest)
    return SemanticIds(item_ids, codes, codebook_sizes, largest > 1), report


def _use(
    codes: np.ndarray, codebook_sizes: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns share of codes in use and perplexity, per level."""
    used, perplexity = [], []
    for level, size in enumerate(codebook_sizes):
        counts = np.bincount(codes[:, level], minlength=size)
        shares = counts[counts > 0] / len(codes)
        used.append(float((counts > 0).mean()))
        perplexity.append(float(np.exp(-(shares * np.log(shares)).sum())))
    return tuple(used), tuple(perplexity)
