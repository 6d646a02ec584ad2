"""Lookups of growing texts in C, or plain where there is no compiler."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from recserve.core.text import TextDraft, empty_draft
from recserve.draft.lookup import LOOKED_AT, Ask, Lookup, SuffixLimits
from recserve.draft.plain_lookup import PlainLookup
from recserve.draft.text_index import GAP
from recserve.kernels import dispatch
from recserve.kernels.native_lookup import (
    Asked,
    Counted,
    Found,
    NativeIndex,
    ngram_trees,
    suffix_trees,
)


def text_lookup(lengths: Seq[int], capacity: int = 0) -> Lookup:
    """lengths: of the n-grams, ascending. capacity: tokens of the store; 0: there is none."""
    kind = NativeLookup if dispatch.looks_up() else PlainLookup
    return kind(lengths, capacity)


class NativeLookup:
    """All texts of a step in one call."""

    def __init__(self, lengths: Seq[int], capacity: int = 0) -> None:
        self._lengths = tuple(lengths)
        self._texts: dict[int, NativeIndex] = {}
        self._store = NativeIndex(lengths, capacity) if capacity else None
        self._counted: dict[SuffixLimits, Counted] = {}

    def ngrams(self, asks: Seq[Ask]) -> list[TextDraft]:
        """See Lookup."""
        return _drafts(ngram_trees(self._asked(asks), LOOKED_AT))

    def suffixes(self, asks: Seq[Ask], limits: SuffixLimits) -> list[TextDraft]:
        """See Lookup."""
        counted = self._counted.get(limits)
        if counted is None:
            rooms = array("q", [limits.room(m) for m in range(limits.max_match + 1)])
            counted = Counted(rooms, limits.occurrences, limits.min_prob)
            self._counted[limits] = counted
        return _drafts(suffix_trees(self._asked(asks), self._store, counted))

    def _asked(self, asks: Seq[Ask]) -> list[Asked]:
        asked, texts = [], self._texts
        for id, tokens, num_nodes, depth, branches in asks:
            text = texts.get(id)
            if text is None:
                text = texts[id] = NativeIndex(self._lengths)
            asked.append(Asked(text, tokens[text.stop :], num_nodes, depth, branches))
        return asked

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
