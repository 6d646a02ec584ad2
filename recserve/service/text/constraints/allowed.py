"""Texts of some tokens only, beside another constraint or without one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recserve.core.constraint import Constraint, Matcher, mask_of


class AllowedTokens:
    """A constraint to some tokens. It is its own matcher, because it has no state but `inner`'s.

    Attributes:
        inner: A further constraint, or its matcher. None allows the tokens everywhere.
    """

    def __init__(self, mask: NDArray[np.int32], inner: Matcher | None = None) -> None:
        self.mask, self.inner = mask, inner

    def fill(self, row: NDArray[np.int32]) -> None:
        """Writes the mask of the tokens that may follow."""
        if self.inner is None:
            row[:] = self.mask
        else:
            self.inner.fill(row)
            row &= self.mask

    def forces(self) -> bool:
        """Returns whether the other constraint has only one token."""
        return self.inner is not None and self.inner.forces()

    def advance(self, token: int) -> None:
        """Appends a token."""
        if self.inner is not None:
            self.inner.advance(token)

    def roll_back(self, count: int) -> None:
        """Removes the last tokens."""
        if self.inner is not None:
            self.inner.roll_back(count)

    def fork(self) -> AllowedTokens:
        """Returns a matcher of the same state."""
        return AllowedTokens(self.mask, None if self.inner is None else self.inner.fork())


class AllowedConstraint:
    """The constraint to some tokens, and to another constraint if there is one."""

    def __init__(self, tokens: Sequence[int], vocab_size: int, other: Constraint | None) -> None:
        self._mask, self._other = mask_of(tokens, vocab_size), other
        self.end_tokens = () if other is None else other.end_tokens

    def start(self) -> AllowedTokens:
        """Returns the matcher of an empty text."""
        return AllowedTokens(self._mask, None if self._other is None else self._other.start())

    def restart(self, tokens: Sequence[int]) -> AllowedTokens:
        """Returns a matcher that has advanced over tokens, as `Constraint`."""
        other = self._other
        return AllowedTokens(self._mask, None if other is None else other.restart(tokens))
