"""Lookups of growing texts in Python and numpy, where there is no compiler: the truth of the
lookups in C.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np

from recserve.speculation.drafters.draft_tree import DraftTree
from recserve.speculation.drafters.host_draft import NOTHING, HostDraft, as_tensors, chain
from recserve.speculation.drafters.lookup import LOOKED_AT, USUAL, Ask, SuffixLimits
from recserve.speculation.drafters.suffix_counts import NO_GUESS, Guess, likeliest
from recserve.speculation.drafters.text_index import GAP, TextIndex
from recserve.speculation.text import TextDraft


class PlainLookup:
    """Text by text."""

    def __init__(self, lengths: Seq[int], capacity: int = 0, limits: SuffixLimits = USUAL) -> None:
        self._lengths, self._limits = tuple(lengths), limits
        self._texts: dict[int, TextIndex] = {}
        self._store = TextIndex(lengths, capacity) if capacity else None

    def ngrams(self, asks: Seq[Ask]) -> list[TextDraft]:
        """See Lookup."""
        return as_tensors([self._continued(ask, self._text(ask)) for ask in asks])

    def suffixes(self, asks: Seq[Ask]) -> list[TextDraft]:
        """See Lookup."""
        return as_tensors([self._counted(ask, self._text(ask)) for ask in asks])

    def _text(self, ask: Ask) -> TextIndex:
        """The text's index, up to date."""
        text = self._texts.get(ask.id)
        if text is None:
            text = self._texts[ask.id] = TextIndex(self._lengths)
        text.extend(ask.tokens[text.stop :])
        return text

    def _continued(self, ask: Ask, text: TextIndex) -> HostDraft:
        if not ask.depth:
            return NOTHING
        if ask.branches == 1:
            end = next(self._ends(text, 1), None)
            return NOTHING if end is None else chain(continuation(text, end, ask.depth))
        tree, used = DraftTree(), 0
        for end in dict.fromkeys(self._ends(text, LOOKED_AT * ask.branches)):
            before = len(tree)
            tree.add_path(continuation(text, end, ask.depth), ask.num_nodes)
            used += len(tree) > before
            if used == ask.branches:
                break
        return tree.finish(tree.preorder())

    def _ends(self, text: TextIndex, most: int) -> Iterator[int]:
        """Where the end of the text stood before: long matches first, newest first."""
        for n in reversed(self._lengths):
            yield from text.ends(n, most)

    def _counted(self, ask: Ask, text: TextIndex) -> HostDraft:
        if not ask.depth:
            return NOTHING
        tail, most = ask.tokens[-self._limits.max_match :], self._limits.occurrences
        lengths = self._lengths[::-1]
        own = [end for n in lengths for end in text.ends(n, most)]
        guess = self._guess(text, own, tail, ask)
        if self._store is not None:
            known = [n for n in lengths if n <= len(tail)]
            other = [end for n in known for end in self._store.ends_of(tail[-n:], most)]
            rival = self._guess(self._store, other, tail, ask)
            guess = max(guess, rival, key=lambda g: g.score)
        return guess.draft

    def _guess(self, text: TextIndex, ends: list[int], tail: list[int], ask: Ask) -> Guess:
        if not ends:
            return NO_GUESS
        places = np.array(list(dict.fromkeys(ends)), np.int64)
        rows = text.following(places, ask.depth)
        matches = text.matches(places, np.array(tail, np.int64))
        used = (rows[:, 0] != GAP) & (matches > 0)
        return likeliest(rows[used], matches[used], self._limits, ask.num_nodes, ask.branches == 1)

    def forget(self, id: int) -> None:
        """See Lookup."""
        self._texts.pop(id, None)

    def store(self, tokens: Seq[int]) -> None:
        """See Lookup."""
        if self._store is not None:
            self._store.extend([*tokens, GAP])


def continuation(text: TextIndex, end: int, length: int) -> list[int]:
    """`length` tokens after position `end`, going on in themselves where the text is over."""
    known = min(length, text.stop - 1 - end)
    tokens = text.after(end, known)
    for i in range(known, length):
        tokens.append(tokens[i - known])
    return tokens
