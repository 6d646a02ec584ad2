"""What a text may be: requests for constraints, and the automata that follow a text.

A `Grammar` or a `Choices` says what a text must look like. The text service compiles it to a
`Constraint`, which the engine knows as an automaton: each text has a `Matcher`, whose state is the
text so far. The matcher says which tokens may follow. Where only one may, it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from recserve.bounds import MAX_BLANKS, MAX_CHOICES

GrammarKind = Literal["json_schema", "regex", "lark"]
MAX_GRAMMAR_BYTES = 1 << 20
MAX_CHOICES_BYTES = 1 << 24
WORD_BITS = 32  # of a mask


class ConstraintError(ValueError):
    """The constraint of a text cannot go on: the text ends with this error."""


class NoTokenLeft(ConstraintError):
    """The constraint allows only tokens that other parameters of the request ban."""


@dataclass(frozen=True)
class Grammar:
    """A request for texts of a grammar.

    Attributes:
        kind: Language of `text`: a JSON schema, a regular expression for the whole text, or a Lark
            grammar.
        text: The grammar.
        blanks: Most blanks in a row between the tokens of JSON. 0 writes compact JSON.

    Raises:
        ValueError: If a value is out of its range.
    """

    kind: GrammarKind
    text: str
    blanks: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ValueError(f"kind is {self.kind!r}; choose one of {get_args(GrammarKind)}")
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"expected at most {MAX_GRAMMAR_BYTES} bytes, got {size}")
        if not 0 <= self.blanks <= MAX_BLANKS:
            raise ValueError(f"blanks: expected 0 to {MAX_BLANKS}, got {self.blanks}")


@dataclass(frozen=True)
class Choices:
    """A request for one of some texts.

    Attributes:
        texts: The texts, none of them empty.

    Raises:
        ValueError: If there are too few or too many, or if one is empty.
    """

    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.texts) <= MAX_CHOICES:
            raise ValueError(f"expected 1 to {MAX_CHOICES} choices, got {len(self.texts)}")
        if "" in self.texts:
            raise ValueError(f"choice {self.texts.index('')} is empty")
        sizes = [len(text.encode("utf-8", "surrogatepass")) for text in self.texts]
        if max(sizes) > MAX_GRAMMAR_BYTES:
            place = sizes.index(max(sizes))
            raise ValueError(
                f"expected at most {MAX_GRAMMAR_BYTES} bytes of one choice, got {sizes[place]} "
                f"of choice {place}"
            )
        if sum(sizes) > MAX_CHOICES_BYTES:
            raise ValueError(f"expected at most {MAX_CHOICES_BYTES} bytes, got {sum(sizes)}")


class Matcher(Protocol):
    """The automaton of one text. Its state is the tokens that it has advanced over.

    End tokens are in a mask where the text may end. A matcher never advances over them.
    """

    def fill(self, row: NDArray[np.int32]) -> None:
        """Writes the mask of the tokens that may follow.

        Args:
            row: [W] receives bit t % 32 of word t // 32 for token t.

        Raises:
            ConstraintError: If a limit of the matcher is met. It is of no use from then on, and
                `Constraint.restart` says whether the text can go on.
        """
        ...

    def forces(self) -> bool:
        """Returns whether only one token may follow, as far as that shows without the mask."""
        ...

    def advance(self, token: int) -> None:
        """Appends a token of the current mask. Raises ConstraintError as `fill`."""
        ...

    def roll_back(self, count: int) -> None:
        """Removes the last tokens. Raises ConstraintError as `fill`."""
        ...

    def fork(self) -> Matcher:
        """Returns a matcher of the same state, which goes its own way."""
        ...


class Constraint(Protocol):
    """A compiled constraint, which any number of texts may share."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that a matcher allows at the end only. They are stop tokens of its texts."""
        ...

    def start(self) -> Matcher:
        """Returns the matcher of an empty text. It is safe to call from any thread."""
        ...

    def restart(self, tokens: Sequence[int]) -> Matcher:
        """Returns a matcher that has advanced over tokens, and has met nothing else.

        It takes up to a second, and is safe to call from any thread.

        Raises:
            ConstraintError: If the tokens alone meet a limit.
        """
        ...


def num_words(vocab_size: int) -> int:
    """Returns W, the number of words of a mask."""
    return -(-vocab_size // WORD_BITS)


def has_token(row: NDArray[np.int32], token: int) -> bool:
    """Returns whether a mask allows a token."""
    return bool(int(row[token // WORD_BITS]) >> (token % WORD_BITS) & 1)


def mask_of(tokens: Sequence[int] | NDArray[np.int64], vocab_size: int) -> NDArray[np.int32]:
    """Returns the mask [W] of some tokens."""
    bits = np.zeros(num_words(vocab_size) * WORD_BITS, np.uint8)
    bits[np.asarray(tokens, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
