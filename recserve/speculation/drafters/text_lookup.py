"""Lookups of growing texts in C, or plain where there is no compiler."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from recserve.kernels import dispatch
from recserve.kernels.cpu.native_lookup import Counting, Found, NativeIndex, Question
from recserve.speculation.drafters.lookup import LOOKED_AT, USUAL, Ask, Lookup, SuffixLimits
from recserve.speculation.drafters.plain_lookup import PlainLookup
from recserve.speculation.drafters.text_index import GAP
from recserve.speculation.text import TextDraft, empty_draft


def text_lookup(lengths: Seq[int], capacity: int = 0, limits: SuffixLimits = USUAL) -> Lookup:
    """lengths: of the n-grams, ascending. capacity: tokens of the store; 0: there is none. limits:
    of suffixes.
    """
    kind = NativeLookup if dispatch.looks_up() else PlainLookup
    return kind(lengths, capacity, limits)


class NativeLookup:
    """All texts of a step in one call."""

    def __init__(self, lengths: Seq[int], capacity: int = 0, limits: SuffixLimits = USUAL) -> None:
        self._lengths = tuple(lengths)
        self._texts: dict[int, NativeIndex] = {}
        self._store = NativeIndex(lengths, capacity) if capacity else None
        rooms = [limits.room(match) for match in range(limits.max_match + 1)]
        self._counting = Counting(self._store, rooms, limits.occurrences, limits.min_prob)

    def ngrams(self, asks: Seq[Ask]) -> list[TextDraft]:
        """See Lookup."""
        return _drafts(self._question(asks).ngrams(LOOKED_AT))

    def suffixes(self, asks: Seq[Ask]) -> list[TextDraft]:
        """See Lookup."""
        return _drafts(self._question(asks).suffixes(self._counting))

    def _question(self, asks: Seq[Ask]) -> Question:
        question, texts = Question(), self._texts
        for id, tokens, num_nodes, depth, branches in asks:
            text = texts.get(id)
            if text is None:
                text = texts[id] = NativeIndex(self._lengths)
            question.add(text, tokens[text.stop :], num_nodes, depth, branches)
        return question

    def forget(self, id: int) -> None:
        """See Lookup."""
        self._texts.pop(id, None)

    def store(self, tokens: Seq[int]) -> None:
        """See Lookup."""
        if self._store is not None:
            self._store.extend([*tokens, GAP])


def _drafts(found: Found) -> list[TextDraft]:
    return [
        TextDraft(tokens, parents, depth) if depth else empty_draft()
        for tokens, parents, depth in zip(found.tokens, found.parents, found.depths, strict=True)
    ]
