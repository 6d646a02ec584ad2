"""A text that is one of many: a trie of the choices' tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recserve.core.constraint import ConstraintError, mask_of


class ChoiceTrie:
    """The trie of some token sequences. A node is a range of the sorted sequences.

    A node (first, last, depth) stands for the sequences `first` to `last` - 1, which share their
    first `depth` tokens. Sorted, the one that ends there comes first, and children follow each
    other.

    Attributes:
        vocab_size: Number of tokens that the model scores.
        end_tokens: Tokens that end a text.
    """

    def __init__(
        self, sequences: Sequence[Sequence[int]], vocab_size: int, end_tokens: Sequence[int]
    ) -> None:
        self.vocab_size, self.end_tokens = vocab_size, tuple(end_tokens)
        rows = sorted(set(map(tuple, sequences)))
        self._lengths = np.array([len(row) for row in rows], np.int64)
        self._starts = np.zeros(len(rows), np.int64)
        self._lengths[:-1].cumsum(out=self._starts[1:])
        self._tokens = np.array([token for row in rows for token in row], np.int64)
        self._root = self._read((0, len(rows), 0))  # of all nodes, it has the most children

    @property
    def num_bytes(self) -> int:
        """Memory of the trie."""
        return self._lengths.nbytes + self._starts.nbytes + self._tokens.nbytes

    def start(self) -> ChoiceMatcher:
        """Returns the matcher of an empty text."""
        return ChoiceMatcher(self, [(0, len(self._lengths), 0)])

    def restart(self, tokens: Sequence[int]) -> ChoiceMatcher:
        """Returns a matcher that has advanced over tokens."""
        matcher = self.start()
        for token in tokens:
            matcher.advance(token)
        return matcher

    def following(self, node: tuple[int, int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the tokens of a node's children, and the first sequence of each child."""
        return self._root if node[2] == 0 else self._read(node)

    def is_end(self, node: tuple[int, int, int]) -> bool:
        """Returns whether a sequence ends at a node."""
        first, _, depth = node
        return bool(self._lengths[first] == depth)

    def child(self, node: tuple[int, int, int], token: int) -> tuple[int, int, int] | None:
        """Returns the child of a node for a token; None if it has none."""
        tokens, firsts = self.following(node)
        place = int(np.searchsorted(tokens, token))
        if place == len(tokens) or tokens[place] != token:
            return None
        last = node[1] if place + 1 == len(tokens) else int(firsts[place + 1])
        return int(firsts[place]), last, node[2] + 1

    def _read(self, node: tuple[int, int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first, last, depth = node
        first += self.is_end(node)
        column = self._tokens[self._starts[first:last] + depth]
        places = np.flatnonzero(np.diff(column, prepend=-1))
        return column[places], places + first


class ChoiceMatcher:
    """The place of one text in a trie of choices."""

    def __init__(self, trie: ChoiceTrie, path: list[tuple[int, int, int]]) -> None:
        self._trie, self._path = trie, path

    def fill(self, row: NDArray[np.int32]) -> None:
        """Writes the mask of the tokens that may follow."""
        trie, node = self._trie, self._path[-1]
        tokens = trie.following(node)[0]
        ends = trie.end_tokens if trie.is_end(node) else ()
        row[:] = mask_of(np.append(tokens, ends).astype(np.int64), trie.vocab_size)

    def forces(self) -> bool:
        """Returns whether only one token may follow."""
        node = self._path[-1]
        return len(self._trie.following(node)[0]) + self._trie.is_end(node) == 1

    def advance(self, token: int) -> None:
        """Appends a token. Raises ConstraintError if no choice goes on with it."""
        child = self._trie.child(self._path[-1], token)
        if child is None:
            raise ConstraintError(f"no choice goes on with token {token}")
        self._path.append(child)

    def roll_back(self, count: int) -> None:
        """Removes the last tokens."""
        if count:
            del self._path[-count:]

    def fork(self) -> ChoiceMatcher:
        """Returns a matcher of the same place."""
        return ChoiceMatcher(self._trie, list(self._path))
