"""Suffix decoding: drafts what followed earlier occurrences of the text's end, by frequency.

For every length m of the matched end, the occurrences that match m tokens give a tree of their
continuations. A node's probability is its share of these occurrences. A longer match may draft
more nodes. The drafter proposes the m whose draft has the largest sum of probabilities, which is
its expected accept length. It searches the text itself and a store of earlier outputs with the
same salt.

Source: SuffixDecoding (arXiv 2411.04975), section 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice, repeat

from recserve.drafters.shared.limits import limit_budget, only_chains
from recserve.drafters.shared.token_string import (
    GAP,
    RunningTexts,
    draft_of_paths,
    earlier_ends,
    to_string,
)
from recserve.drafters.suffix.output_store import OutputStore
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, TextContext

# Lengths of the indexed n-grams, longest first. Comparing tokens finds the lengths between them.
ANCHORS = (8, 4, 2, 1)


@dataclass(frozen=True)
class SuffixLimits:
    """Limits of a suffix draft.

    Attributes:
        num_tokens: Most nodes.
        depth: Most levels.
        max_match: A longer match counts as this many tokens.
        factor: A match of m tokens drafts at most `factor * m + offset` nodes.
        offset: See `factor`.
        min_prob: Smallest probability of a node, above 0 and at most 1.
        occurrences: Most occurrences of one n-gram that are counted, the newest ones.

    Raises:
        ValueError: If `min_prob` is out of its range.
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

    def num_nodes(self, match: int) -> int:
        """Returns the most nodes of a draft after a match of `match` tokens."""
        return int(self.factor * match + self.offset)


DEFAULT_LIMITS = SuffixLimits()


@dataclass(frozen=True)
class _Guess:
    """Paths of a draft, and its expected accept length if the text repeats the past."""

    paths: tuple[str, ...] = ()
    score: float = 0.0


@dataclass(frozen=True)
class _Query:
    """The end of a text, and the size limits of its draft.

    Attributes:
        text: All committed tokens.
        num_nodes: Most nodes of the draft.
        depth: Most levels of the draft.
        only_chain: True if the draft must not fork.
        salt: Salt of the sequence.
    """

    text: str
    num_nodes: int
    depth: int
    only_chain: bool
    salt: bytes


class SuffixDrafter(Drafter):
    """Searches each sequence's own text, and a store of the outputs of all sequences.

    A sequence finds the outputs of sequences with its own salt only.

    Args:
        limits: Size of the drafts.
        capacity: Most tokens of the store; 0 means no store. An output enters the store when its
            sequence ends or is preempted.

    Raises:
        ValueError: If the capacity is negative.
    """

    name = "suffix"

    def __init__(self, limits: SuffixLimits = DEFAULT_LIMITS, capacity: int = 2**17) -> None:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity}; it must be at least 0")
        self.limits = limits
        self._store = OutputStore(capacity, ANCHORS) if capacity else None
        self._texts = RunningTexts()
        self._contexts: dict[int, TextContext] = {}

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns the better guess of the two sources; on a tie, the one from the text itself."""
        return [self._draft(c, b) for c, b in zip(contexts, budgets, strict=True)]

    def _draft(self, context: TextContext, budget: Budget) -> TextDraft:
        self._contexts[context.id] = context
        text = self._texts.update(context)
        budget = limit_budget(context, budget, self.limits.num_tokens)
        depth = min(budget.depth, budget.num_nodes, self.limits.depth)
        if not depth:
            return empty_draft()
        query = _Query(text, budget.num_nodes, depth, only_chains(context), context.salt)
        guess = self._better(_Guess(), query, None)
        if self._store is not None:
            guess = self._better(guess, query, self._store)
        return draft_of_paths(guess.paths) if guess.paths else empty_draft()

    def _better(self, best: _Guess, query: _Query, store: OutputStore | None) -> _Guess:
        """Returns the best guess over all match lengths if its score is higher than that of `best`.

        Long matches come first. No tree of m matched tokens has a higher score than it has nodes or
        levels, so the search ends as soon as no shorter match can win.
        """
        counted: list[str] = []
        seen: set[tuple[str, int]] = set()
        longest = self.limits.max_match
        for length in ANCHORS:
            if length > longest:
                continue
            if best.score >= self._bound(longest, query):
                break
            by_match = self._matches(query, store, length, longest, seen)
            for match in sorted(by_match, reverse=True):
                counted += by_match[match]
                if best.score < self._bound(match, query):
                    best = max(best, self._grow(counted, match, query), key=lambda g: g.score)
            longest = length - 1
        return best

    def _bound(self, match: int, query: _Query) -> int:
        return min(self.limits.num_nodes(match), query.num_nodes, query.depth)

    def _matches(
        self,
        query: _Query,
        store: OutputStore | None,
        length: int,
        longest: int,
        seen: set[tuple[str, int]],
    ) -> dict[int, list[str]]:
        """Returns continuations of the newest occurrences of the last `length` tokens, by match.

        Args:
            query: The text, and the depth of a continuation.
            store: Store to search; None searches the text itself.
            length: One of ANCHORS.
            longest: A longer match counts as this long.
            seen: Occurrences of longer n-grams, which are skipped; new ones are added.

        Returns:
            Continuations by match length.
        """
        text, found = query.text, dict[int, list[str]]()
        if len(text) < length:
            return found
        for place in islice(_ends(query, length, store), self.limits.occurrences):
            if place in seen:
                continue
            seen.add(place)
            other, end = place
            match = length
            most = min(longest, end, len(text))
            while match < most and other[end - match - 1] == text[-match - 1]:
                match += 1
            followed = other[end : end + query.depth]
            if store is not None:
                followed = followed.partition(GAP)[0]
            if followed:
                found.setdefault(match, []).append(followed)
        return found

    def _grow(self, followed: list[str], match: int, query: _Query) -> _Guess:
        """Returns the likeliest nodes of the tree of continuations, in preorder on a tie.

        Shares fall along a path, so a node is always added after its parent.
        """
        most = min(self.limits.num_nodes(match), query.num_nodes)
        least = self.limits.min_prob * len(followed)
        paths: list[str] = []
        total = 0
        open_nodes = [(-len(followed), "", followed)]
        while open_nodes and len(paths) < most:
            count, path, group = heapq.heappop(open_nodes)
            if path:
                paths.append(path)
                total -= count
            if len(group) == 1:
                # A single continuation has the same share at every depth, so its nodes follow
                # each other in the order of shares.
                rest = group[0][: len(path) + most - len(paths)]
                paths += [rest[:stop] for stop in range(len(path) + 1, len(rest) + 1)]
                total += max(len(rest) - len(path), 0)
                continue
            below = _children(group, path, least)
            if query.only_chain:
                below = [min(below)] if below else []
            for node in below:
                heapq.heappush(open_nodes, node)
        return _Guess(tuple(paths), total / len(followed))

    def forget(self, context_id: int) -> None:
        """Moves the sequence's output to the store."""
        self._texts.forget(context_id)
        context = self._contexts.pop(context_id, None)
        if context is not None and context.num_output and self._store is not None:
            self._store.add(to_string(context.tokens[context.num_prompt :]), context.salt)


def _ends(query: _Query, length: int, store: OutputStore | None) -> Iterable[tuple[str, int]]:
    """Returns earlier occurrences of the last `length` tokens: a string, and the next index."""
    if store is None:
        return zip(repeat(query.text), earlier_ends(query.text, length))
    return store.ends(query.text[-length:], query.salt)


def _children(group: list[str], path: str, least: float) -> list[tuple[int, str, list[str]]]:
    """Returns entries (-count, path, continuations) of the children that occur often enough."""
    depth = len(path)
    by_token: dict[str, list[str]] = {}
    for followed in group:
        token = followed[depth : depth + 1]
        if token:
            by_token.setdefault(token, []).append(followed)
    return [
        (-len(below), path + token, below)
        for token, below in by_token.items()
        if len(below) >= least
    ]
