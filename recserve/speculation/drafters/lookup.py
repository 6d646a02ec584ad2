"""What a lookup of growing texts is asked, and what it is: in C (native_lookup.py) or plain."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from recserve.speculation.text import TextDraft

ANCHORS = (1, 2, 4, 8)  # n-grams that begin a suffix; longer matches are told apart by comparing
LOOKED_AT = 8  # occurrences of an n-gram for each branch that is wanted


class Ask(NamedTuple):
    """Of one text, by its id: its committed tokens, and what its draft may be.

    num_nodes, depth: most; 0: no draft. branches: most continuations of n-grams that are merged
    into one tree; 1: a draft without forks.
    """

    id: int
    tokens: list[int]
    num_nodes: int
    depth: int
    branches: int


@dataclass(frozen=True)
class SuffixLimits:
    """num_tokens, depth: most nodes, and most levels. max_match: a longer match counts as this
    long. factor, offset: a match of m tokens drafts at most `factor m + offset` nodes.
    min_prob: least share of a node. occurrences: looked at per n-gram, the newest.

    Raises ValueError for a min_prob that lets in what never followed.
    """

    num_tokens: int = 24
    depth: int = 16
    max_match: int = 24
    factor: float = 1.5
    offset: float = 0.0
    min_prob: float = 0.1
    occurrences: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.min_prob <= 1:
            raise ValueError(f"min_prob is {self.min_prob}; it must be above 0 and at most 1")

    def room(self, match: int) -> int:
        """Most nodes drafted after a match of so many tokens."""
        return int(self.factor * match + self.offset)


USUAL = SuffixLimits()


class Lookup(Protocol):
    """Indexes of texts that grow, by id; each knows the tokens of its text that it was asked about
    before. What a text adds is indexed once, at a cost that does not depend on its length.
    """

    def ngrams(self, asks: Seq[Ask]) -> list[TextDraft]:
        """What followed the longest n-grams that a text ended with before, the newest first."""
        ...

    def suffixes(self, asks: Seq[Ask]) -> list[TextDraft]:
        """The likeliest tree of what followed the end of a text, in itself or in the store."""
        ...

    def forget(self, id: int) -> None:
        """Drop a text's index."""
        ...

    def store(self, tokens: Seq[int]) -> None:
        """Keep an output for all texts, in place of the oldest tokens."""
        ...
