"""A store of earlier outputs with an index of their n-grams."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import chain

from recserve.speculation.drafters.token_string import GAP


class OutputStore:
    """The newest outputs of ended texts, at most `capacity` tokens.

    The store has two segments of half the capacity. When the newer one is full, the older one is
    dropped. A token takes about 40 bytes.

    Args:
        capacity: Most tokens, at least 2. Each output uses one more, which separates it from the
            next.
        lengths: Lengths of the n-grams to index.
    """

    def __init__(self, capacity: int, lengths: Seq[int]) -> None:
        self._half, self._lengths = capacity // 2, lengths
        self._segments = [_Segment(self._half, lengths)]

    def __len__(self) -> int:
        """Number of stored tokens, separators included."""
        return sum(len(segment.text) for segment in self._segments)

    def add(self, output: str) -> None:
        """Stores an output; of an output that is too long, it stores the end."""
        output = output[1 - self._half :] + GAP if self._half > 1 else GAP
        if len(self._segments[0].text) + len(output) > self._half:
            self._segments = [_Segment(self._half, self._lengths), self._segments[0]]
        self._segments[0].add(output)

    def ends(self, ngram: str) -> Iterator[tuple[str, int]]:
        """Yields a segment's string, and the index after the n-gram, for each occurrence."""
        return chain.from_iterable(segment.ends(ngram) for segment in self._segments)


class _Segment:
    """A string with an n-gram index. Positions whose n-grams share a bucket form a chain."""

    def __init__(self, capacity: int, lengths: Seq[int]) -> None:
        size = 1 << capacity.bit_length()
        self.text = ""
        self._mask = size - 1
        self._heads = {n: array("i", bytes(4 * size)) for n in lengths}
        self._earlier = {n: array("i", [0]) for n in lengths}  # by end; 0 ends a chain

    def add(self, output: str) -> None:
        start = len(self.text)
        self.text += output
        text, mask = self.text, self._mask
        for n, heads in self._heads.items():
            earlier = self._earlier[n]
            for end in range(start + 1, len(text) + 1):
                bucket = hash(text[max(end - n, 0) : end]) & mask
                earlier.append(heads[bucket])
                heads[bucket] = end

    def ends(self, ngram: str) -> Iterator[tuple[str, int]]:
        text, length = self.text, len(ngram)
        earlier = self._earlier[length]
        end = self._heads[length][hash(ngram) & self._mask]
        while end:
            if end >= length and text.startswith(ngram, end - length):
                yield text, end
            end = earlier[end]
