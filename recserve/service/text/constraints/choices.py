"""A text that is one of many: a trie of the choices' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recserve.core.constraint import ConstraintError, mask_of
from recserve.tokenizer.tokenizer import TextTokenizer

TOKEN = np.dtype(">u4")
CHUNK = 1000  # texts that are encoded at once; other threads run in between


class UnspelledChoice(ValueError):
    """No tokens write a choice.

    Attributes:
        place: Its place in the list.
    """

    def __init__(self, place: int, text: str) -> None:
        super().__init__(f"no tokens write {text[:80]!r}")
        self.place = place


def encode_choices(
    texts: Sequence[str], tokenizer: TextTokenizer
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the tokens [T] of all texts, one after another, and the number [S] of each text.

    Raises:
        UnspelledChoice: If no tokens write a text.
    """
    table = pa.array(tokenizer.all_bytes, pa.large_binary())
    parts = list[NDArray[np.int64]]()
    sizes = list[NDArray[np.int64]]()
    for begin in range(0, len(texts), CHUNK):
        wanted = [text.encode("utf-8", "surrogatepass") for text in texts[begin : begin + CHUNK]]
        rows = tokenizer.encode_all(texts[begin : begin + CHUNK])
        tokens, lengths = _flatten(rows)
        written = table.take(pa.array(tokens))
        ends = np.frombuffer(written.buffers()[1], np.int64, len(tokens) + 1)
        bounds = ends[np.concatenate([[0], lengths.cumsum()])]
        found = _binary(written.buffers()[2], np.diff(bounds))
        same = np.asarray(pc.equal(found, pa.array(wanted, pa.large_binary())))
        for place in np.flatnonzero(~same).tolist():
            # Many tokenisers put a space before a text, which a choice does not have.
            spelled = tokenizer.spell(wanted[place])
            if spelled is None:
                raise UnspelledChoice(begin + place, texts[begin + place])
            rows[place] = spelled
        if not same.all():
            tokens, lengths = _flatten(rows)
        parts.append(tokens)
        sizes.append(lengths)
    return np.concatenate(parts), np.concatenate(sizes)


def _flatten(rows: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns all tokens of some rows, and the length of each row."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum())), lengths


def _binary(data: Any, sizes: NDArray[np.int64]) -> Any:
    """Returns byte strings of these sizes, which follow each other in a buffer, for Arrow."""
    ends = np.zeros(len(sizes) + 1, np.int64)
    sizes.cumsum(out=ends[1:])
    if data is None or not len(data):
        data = b""
    buffers = [
        None,
        pa.py_buffer(ends),
        data if isinstance(data, pa.Buffer) else pa.py_buffer(data),
    ]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(sizes), buffers)


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
        self,
        tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
        vocab_size: int,
        end_tokens: Sequence[int],
    ) -> None:
        """Sorts the sequences, for the most part without the GIL.

        Args:
            tokens: [T] tokens of all sequences, one after another.
            lengths: [S] number of tokens of each sequence.
            vocab_size: Number of tokens that the model scores.
            end_tokens: Tokens that end a text.
        """
        self.vocab_size, self.end_tokens = vocab_size, tuple(end_tokens)
        # As big-endian numbers, tokens have the order of their bytes.
        rows = _binary(tokens.astype(TOKEN), lengths * TOKEN.itemsize)
        rows = rows.take(pc.array_sort_indices(rows))
        first = pc.invert(pc.equal(rows[1:], rows[:-1]))
        rows = rows.filter(pa.concat_arrays([pa.array([True]), first]))
        self._lengths = np.asarray(pc.binary_length(rows)) // TOKEN.itemsize
        self._starts = np.zeros(len(rows), np.int64)
        self._lengths[:-1].cumsum(out=self._starts[1:])
        data = rows.buffers()[2]
        count = int(self._lengths.sum())
        self._tokens = np.frombuffer(data, TOKEN, count).astype(np.int64)
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
