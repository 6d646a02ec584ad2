"""Where the n-grams of a growing text ended before.

A chain of positions per n-gram, newest first: a head by hash, and for each position the one before
it. Adding a token costs the same however long the text is. What follows equal n-grams, counted, is
a suffix tree's subtree; it is made when it is asked for instead of being kept. The plain twin of
NativeIndex (kernels/cpu/native_lookup.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

GAP = -1  # between two texts in one index; belongs to no n-gram


class TextIndex:
    """Tokens with the n-grams of some lengths; positions count from the first token ever added.

    lengths: of the n-grams, ascending. capacity: tokens kept, the oldest leave first; None: all.
    """

    def __init__(self, lengths: Seq[int], capacity: int | None = None) -> None:
        self.lengths = tuple(lengths)
        self.capacity = capacity
        self.start = self.stop = 0
        # A text that forgets is a ring; one that does not is a buffer that doubles.
        self._tokens = np.full(256 if capacity is None else capacity, GAP, np.int64)
        self._earlier: dict[int, list[int]] = {n: [] for n in self.lengths}
        self._keys: dict[int, list[int]] = {n: [] for n in self.lengths}
        self._heads: dict[int, int] = {}
        self._tail: list[int] = []

    def __len__(self) -> int:
        """Tokens added so far, those that left included."""
        return self.stop

    def extend(self, tokens: Seq[int]) -> None:
        """Add tokens, each at least 0, or GAP."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        if self.stop - self.start == len(self._tokens):
            if self.capacity is None:
                self._tokens = np.concatenate([self._tokens, np.full_like(self._tokens, GAP)])
            else:
                self._drop_oldest()
        slot, tail, heads = self.stop % len(self._tokens), self._tail, self._heads
        self._tokens[slot] = token
        if token == GAP:
            tail.clear()
        else:
            tail.append(token)
            if len(tail) > self.lengths[-1]:
                del tail[0]
        known = len(tail)
        for n in self.lengths:
            key, earlier = GAP, -1
            if known >= n:
                key = hash(tuple(tail[-n:]))
                earlier = heads.get(key, -1)
                heads[key] = self.stop
            _put(self._earlier[n], slot, earlier)
            if self.capacity is not None:
                _put(self._keys[n], slot, key)
        self.stop += 1

    def _drop_oldest(self) -> None:
        slot = self.start % len(self._tokens)
        for n in self.lengths:
            key = self._keys[n][slot]
            if self._heads.get(key) == self.start:
                del self._heads[key]
        self.start += 1

    def ends(self, n: int, limit: int) -> list[int]:
        """Where the last n tokens ended before, newest first, at most `limit` positions."""
        if len(self._tail) < n:
            return []
        return self._walk(n, self._earlier[n][(self.stop - 1) % len(self._tokens)], limit)

    def ends_of(self, tokens: Seq[int], limit: int) -> list[int]:
        """Where these tokens, as many as one of the lengths, ended; newest first."""
        return self._walk(len(tokens), self._heads.get(hash(tuple(tokens)), -1), limit)

    def _walk(self, n: int, position: int, limit: int) -> list[int]:
        found: list[int] = []
        size, start, earlier = len(self._tokens), self.start, self._earlier[n]
        while position >= start and limit:
            found.append(position)
            position = earlier[position % size]
            limit -= 1
        return found

    def after(self, position: int, count: int) -> list[int]:
        """So many tokens after the position; they must be kept."""
        first = (position + 1) % len(self._tokens)
        tokens: list[int] = self._tokens[first : first + count].tolist()
        tokens += self._tokens[: count - len(tokens)].tolist()
        return tokens

    def following(self, ends: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
        """[m, depth] the tokens after each of `ends` [m], GAP from where the text ends."""
        places = ends[:, None] + np.arange(1, depth + 1)
        tokens: NDArray[np.int64] = self._tokens[places % len(self._tokens)]
        tokens[places >= self.stop] = GAP
        tokens[np.logical_or.accumulate(tokens == GAP, axis=1)] = GAP
        return tokens

    def matches(self, ends: NDArray[np.int64], suffix: NDArray[np.int64]) -> NDArray[np.int64]:
        """[m] how many tokens up to each of `ends` [m] equal the last ones of `suffix` [k]."""
        places = ends[:, None] - np.arange(len(suffix))
        equal = self._tokens[places % len(self._tokens)] == suffix[::-1]
        equal &= places >= self.start
        lengths: NDArray[np.int64] = np.logical_and.accumulate(equal, axis=1).sum(1)
        return lengths


def _put(column: list[int], slot: int, value: int) -> None:
    if slot == len(column):
        column.append(value)
    else:
        column[slot] = value
