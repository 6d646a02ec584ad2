"""What followed the end of growing texts before, on a CPU in C: all texts of a step in one call.

An index with L lengths of n-grams takes 8 (1 + 2 L) bytes a slot; there are less than twice as many
slots as tokens that it keeps, and at least FIRST_SLOTS.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.cpu.native import N, P, compiled

ALL = 2**62  # tokens kept where none is ever dropped
FIRST_SLOTS = 256


class _Index(ctypes.Structure):
    """`TextIndex` of text_index.h."""

    _fields_ = [
        *((name, N) for name in ("size", "capacity", "stop", "known", "num_lengths")),
        *((name, P) for name in ("lengths", "tokens", "heads", "earlier")),
    ]


class _Suffixes(ctypes.Structure):
    """`Suffixes` of suffix.c."""

    _fields_ = [
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


class Counting:
    """How suffixes are counted, and in which store beside the text itself."""

    def __init__(
        self, store: NativeIndex | None, rooms: Seq[int], occurrences: int, min_prob: float
    ) -> None:
        """rooms [m + 1]: most nodes drafted after a match so long, at most m. The others as in
        speculation/drafters/lookup.py's SuffixLimits.
        """
        self._kept = store, array("q", rooms)
        self._struct = _Suffixes(
            None if store is None else store.address,
            len(rooms) - 1,
            occurrences,
            min_prob,
            self._kept[1].buffer_info()[0],
        )
        self.address = ctypes.addressof(self._struct)


@dataclass(frozen=True)
class Found:
    """Drafts of some texts, each tokens [n] and parents [n] int64 in preorder, -1 for none, and the
    most nodes on a path.
    """

    tokens: Seq[Tensor]
    parents: Seq[Tensor]
    depths: list[int]


class Question:
    """What is asked of some texts, each once: the columns that C reads and writes."""

    def __init__(self) -> None:
        self._asks, self._new = array("q"), array("q")
        self._count = self._most = 0

    def add(
        self, text: NativeIndex, new: list[int], num_nodes: int, depth: int, branches: int
    ) -> None:
        """One more text. new: its tokens that the index does not know yet; num_nodes, depth: most
        of its draft; branches: most continuations of n-grams that are merged, 1: no forks.
        """
        count = len(new)
        text.make_room(count)
        text.stop += count
        self._asks.extend((text.address, count, num_nodes, depth, branches))
        self._new.extend(new)
        self._count += 1
        self._most += num_nodes

    def ngrams(self, looked_at: int) -> Found:
        """Continuations, longest match first. looked_at: occurrences for each branch."""
        return self._found(compiled().ngram_drafts, looked_at)

    def suffixes(self, counting: Counting) -> Found:
        """The likeliest tree over all match lengths, in the text itself or in the store."""
        return self._found(compiled().suffix_drafts, counting.address)

    def _found(self, function: Callable[..., None], how: int) -> Found:
        count, most = self._count, self._most
        shapes = array("q", bytes(16 * count))
        nodes = torch.empty(2 * most, dtype=torch.int64)
        tokens = nodes.data_ptr()
        function(
            self._asks.buffer_info()[0],
            count,
            self._new.buffer_info()[0],
            *(tokens, tokens + 8 * most),
            shapes.buffer_info()[0],
            how,
        )
        told = shapes.tolist()
        sizes, depths = told[::2], told[1::2]
        rest = most - sum(sizes)
        parts = nodes.split_with_sizes([*sizes, rest, *sizes, rest])
        return Found(parts[:count], parts[count + 1 : -1], depths)
