"""A store of earlier outputs with an index of their n-grams."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import chain

from recserve.drafters.shared.token_string import GAP


class OutputStore:
    """The newest outputs of ended texts, at most `capacity` tokens.

    The store has two segments of half the capacity. When the newer one is full, the older one is
    dropped. A token takes about 50 bytes. An output is found under its own salt only. All salts
    share the capacity.

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

    def add(self, output: str, salt: bytes = b"") -> None:
        """Stores an output; of an output that is too long, it stores the end."""
        output = output[1 - self._half :] + GAP if self._half > 1 else GAP
        if len(self._segments[0].text) + len(output) > self._half:
            self._segments = [_Segment(self._half, self._lengths), self._segments[0]]
        self._segments[0].add(output, salt)

    def ends(self, ngram: str, salt: bytes = b"") -> Iterator[tuple[str, int]]:
        """Yields a segment's string, and the index after the n-gram, for each occurrence.

        Args:
            ngram: Tokens of one of the indexed lengths.
            salt: Salt of the outputs to search.
        """
        return chain.from_iterable(segment.ends(ngram, salt) for segment in self._segments)


class _Segment:
    """A string with an n-gram index. Positions whose n-grams share a bucket form a chain.

    The salt is part of an n-gram's hash. So the time of a search does not depend on outputs with
    other salts, except for the few that share a bucket by chance.
    """

    def __init__(self, capacity: int, lengths: Seq[int]) -> None:
        size = 1 << capacity.bit_length()
        self.text = ""
        self._salts: list[bytes] = []  # of each token
        self._mask = size - 1
        self._heads = {n: array("i", bytes(4 * size)) for n in lengths}
        self._earlier = {n: array("i", [0]) for n in lengths}  # by end; 0 ends a chain

    def add(self, output: str, salt: bytes) -> None:
        start = len(self.text)
        self.text += output
        self._salts += [salt] * len(output)
        text, mask, prefix = self.text, self._mask, _prefix(salt)
        for n, heads in self._heads.items():
            earlier = self._earlier[n]
            for end in range(start + 1, len(text) + 1):
                bucket = hash(prefix + text[max(end - n, 0) : end]) & mask
                earlier.append(heads[bucket])
                heads[bucket] = end

    def ends(self, ngram: str, salt: bytes) -> Iterator[tuple[str, int]]:
        text, salts, length = self.text, self._salts, len(ngram)
        earlier = self._earlier[length]
        end = self._heads[length][hash(_prefix(salt) + ngram) & self._mask]
        while end:
            if end >= length and salts[end - 1] == salt and text.startswith(ngram, end - length):
                yield text, end
            end = earlier[end]


def _prefix(salt: bytes) -> str:
    """Returns the text that is hashed in front of an n-gram with a salt."""
    return salt.decode("latin-1")
