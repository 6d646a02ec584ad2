"""What followed the end of growing texts before, on a CPU in C: all texts of a step in one call.

An index with L lengths of n-grams takes 8 (1 + 2 L) bytes a slot; there are less than twice as many
slots as tokens that it keeps, and at least FIRST_SLOTS.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.native import N, P, compiled

ALL = 2**62  # tokens kept where none is ever dropped
FIRST_SLOTS = 256


class _Index(ctypes.Structure):
    """`TextIndex` of text_index.h."""

    _fields_ = [
        *((name, N) for name in ("size", "capacity", "stop", "known", "num_lengths")),
        *((name, P) for name in ("lengths", "tokens", "heads", "earlier")),
    ]


class _Drafts(ctypes.Structure):
    """`Drafts` of draft_tree.h."""

    _fields_ = [
        ("asks", P),
        ("num_asks", N),
        *((name, P) for name in ("new_tokens", "tokens", "parents", "shapes")),
    ]


class _Suffixes(ctypes.Structure):
    """`Suffixes` of suffix.c."""

    _fields_ = [
        ("drafts", _Drafts),
        ("store", P),
        ("max_match", N),
        ("occurrences", N),
        ("min_prob", ctypes.c_double),
        ("rooms", P),
    ]


class NativeIndex:
    """Tokens with the n-grams of some lengths; positions count from the first token ever added.

    lengths: of the n-grams, ascending. capacity: tokens kept, the oldest leave first; None: all.
    """

    def __init__(self, lengths: Seq[int], capacity: int | None = None) -> None:
        self.capacity = capacity
        self._lengths = array("q", lengths)
        self._place(FIRST_SLOTS if capacity is None else capacity + lengths[-1])

    def _place(self, slots: int) -> None:
        """At least so many, nothing in them; what is not touched takes no memory yet."""
        self.size, self.stop = 1 << (slots - 1).bit_length(), 0
        lengths = self._lengths
        width = len(lengths)
        self._cells = np.zeros((1 + 2 * width) * self.size, np.int64)
        tokens = self._cells.ctypes.data
        heads = tokens + 8 * self.size
        self._struct = _Index(
            self.size,
            ALL if self.capacity is None else self.capacity,
            *(0, 0, width, lengths.buffer_info()[0]),
            *(tokens, heads, heads + 8 * width * self.size),
        )
        self.address = ctypes.addressof(self._struct)

    @property
    def start(self) -> int:
        """The oldest position that is kept."""
        return 0 if self.capacity is None else max(self.stop - self.capacity, 0)

    def make_room(self, count: int) -> None:
        """For so many tokens more. An index that keeps all doubles."""
        if self.capacity is None and self.stop + count > self.size:
            known = self._cells[: self.stop].tolist()
            self._place(max(2 * self.size, self.stop + count))
            self.extend(known)

    def extend(self, tokens: Seq[int]) -> None:
        """Add tokens, each at least 0, or negative for a gap between two texts."""
        self.make_room(len(tokens))
        added = array("q", tokens)
        compiled().extend_text(self.address, added.buffer_info()[0], len(added))
        self.stop += len(added)


class Asked(NamedTuple):
    """Of one text: the tokens that are new to its index, and what its draft may be.

    num_nodes, depth: most. branches: most continuations of n-grams that are merged; 1: no forks.
    """

    text: NativeIndex
    new: list[int]
    num_nodes: int
    depth: int
    branches: int


@dataclass(frozen=True)
class Counted:
    """How suffixes are counted. rooms [max_match + 1]: most nodes drafted after a match so long;
    the others as in draft/lookup.py's SuffixLimits.
    """

    rooms: array[int]
    occurrences: int
    min_prob: float


@dataclass(frozen=True)
class Found:
    """Drafts of some texts, each tokens [n] and parents [n] int64 in preorder, -1 for none, and the
    most nodes on a path.
    """

    tokens: Seq[Tensor]
    parents: Seq[Tensor]
    depths: list[int]


def ngram_trees(asked: Seq[Asked], looked_at: int) -> Found:
    """Continuations, longest match first. looked_at: occurrences for each branch."""
    question = _Question(asked)
    compiled().ngram_drafts(ctypes.addressof(question.drafts), looked_at)
    return question.found()


def suffix_trees(asked: Seq[Asked], store: NativeIndex | None, how: Counted) -> Found:
    """The likeliest tree over all match lengths, in the text itself or in the store."""
    question = _Question(asked)
    suffixes = _Suffixes(
        question.drafts,
        None if store is None else store.address,
        len(how.rooms) - 1,
        how.occurrences,
        how.min_prob,
        how.rooms.buffer_info()[0],
    )
    compiled().suffix_drafts(ctypes.addressof(suffixes))
    return question.found()


class _Question:
    """The columns that C reads and writes for some texts."""

    def __init__(self, asked: Seq[Asked]) -> None:
        asks, new, most = array("q"), array("q"), 0
        for text, tokens, num_nodes, depth, branches in asked:
            count = len(tokens)
            text.make_room(count)
            text.stop += count
            asks.extend((text.address, count, num_nodes, depth, branches))
            new.extend(tokens)
            most += num_nodes
        self._asks, self._new, self._most = asks, new, most
        self._shapes = array("q", bytes(16 * len(asked)))
        self._nodes = torch.empty(2 * most, dtype=torch.int64)
        tokens_at = self._nodes.data_ptr()
        self.drafts = _Drafts(
            asks.buffer_info()[0],
            len(asked),
            new.buffer_info()[0],
            *(tokens_at, tokens_at + 8 * most),
            self._shapes.buffer_info()[0],
        )

    def found(self) -> Found:
        """What was written, once it is."""
        shapes = self._shapes.tolist()
        sizes, depths = shapes[::2], shapes[1::2]
        rest, count = self._most - sum(sizes), len(sizes)
        parts = self._nodes.split_with_sizes([*sizes, rest, *sizes, rest])
        return Found(parts[:count], parts[count + 1 : -1], depths)
