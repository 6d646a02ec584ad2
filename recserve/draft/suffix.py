"""Suffix decoding: what followed the end of this text before, here and in earlier outputs, by how
often it did.

For every length m of the matched end, the occurrences that match m tokens give a tree of what
followed them; a node's probability is its share of these occurrences. Longer matches may draft
more, and the m whose draft has the largest sum of probabilities, its expected accept length, is
proposed. The trees are those of a suffix tree, counted over the newest occurrences on demand.
Source: SuffixDecoding (arXiv 2411.04975), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recserve.core.text import Budget, TextContext, TextDraft, TextOutcome
from recserve.draft.host_draft import NOTHING, HostDraft, as_tensors
from recserve.draft.limits import allowed, only_chains
from recserve.draft.text_index import GAP, TextIndex

ANCHORS = (1, 2, 4, 8)  # n-grams looked up; longer matches are told apart by comparing


@dataclass(frozen=True)
class SuffixLimits:
    """num_tokens, depth: most nodes, and most levels. max_match: a longer match counts as this
    long. factor, offset: a match of m tokens drafts at most `factor m + offset` nodes.
    min_prob: least share of a node. occurrences: looked at per n-gram, the newest.
    """

    num_tokens: int = 24
    depth: int = 16
    max_match: int = 24
    factor: float = 1.5
    offset: float = 0.0
    min_prob: float = 0.1
    occurrences: int = 64


@dataclass(frozen=True)
class Guess:
    """A draft and its expected accept length if what was counted goes on as before."""

    draft: HostDraft
    score: float


NO_GUESS = Guess(NOTHING, 0.0)


class SuffixDrafter:
    """Each sequence's own text, and one store of outputs for all.

    capacity: tokens of the store, the oldest leave first; 0: no store. An output enters the store
    when its sequence ends or is set aside.
    """

    def __init__(
        self,
        limits: SuffixLimits | None = None,
        capacity: int = 2**17,
    ) -> None:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity}; it must be at least 0")
        self.limits = limits or SuffixLimits()
        self._store = TextIndex(ANCHORS, capacity) if capacity else None
        self._texts: dict[int, TextIndex] = {}
        self._contexts: dict[int, TextContext] = {}

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """The better of the two sources' guesses, the own text's at a tie."""
        drafts = [self._draft(c, b) for c, b in zip(contexts, budgets, strict=True)]
        return as_tensors(drafts)

    def _draft(self, context: TextContext, budget: Budget) -> HostDraft:
        self._contexts[context.id] = context
        text = self._texts.get(context.id)
        if text is None:
            text = self._texts[context.id] = TextIndex(ANCHORS)
        text.extend(context.tokens[text.stop :])
        budget = allowed(context, budget, self.limits.num_tokens)
        depth = min(budget.depth, budget.num_nodes, self.limits.depth)
        if not depth:
            return NOTHING
        tail = context.tokens[-self.limits.max_match :]
        most = self.limits.occurrences
        own = [end for n in reversed(ANCHORS) for end in text.ends(n, most)]
        guess = self._guess(text, own, tail, budget.num_nodes, depth, only_chains(context))
        if self._store is not None:
            other = [
                end
                for n in reversed(ANCHORS)
                if n <= len(tail)
                for end in self._store.ends_of(tail[-n:], most)
            ]
            rival = self._guess(
                self._store, other, tail, budget.num_nodes, depth, only_chains(context)
            )
            guess = max(guess, rival, key=lambda g: g.score)
        return guess.draft

    def _guess(
        self, text: TextIndex, ends: list[int], tail: list[int], most: int, depth: int, chain: bool
    ) -> Guess:
        if not ends:
            return NO_GUESS
        places = np.array(list(dict.fromkeys(ends)), np.int64)
        rows = text.following(places, depth)
        matches = text.matches(places, np.array(tail, np.int64))
        used = (rows[:, 0] != GAP) & (matches > 0)
        return likeliest(rows[used], matches[used], self.limits, most, chain)

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        """Nothing: the next proposal reads what was committed."""

    def forget(self, context_id: int) -> None:
        """Move the sequence's output to the store."""
        self._texts.pop(context_id, None)
        context = self._contexts.pop(context_id, None)
        if context is not None and self._store is not None and context.num_output:
            self._store.extend([*context.tokens[context.num_prompt :], GAP])


def likeliest(
    rows: NDArray[np.int64],
    matches: NDArray[np.int64],
    limits: SuffixLimits,
    most: int,
    chain: bool = False,
) -> Guess:
    """The best draft over all match lengths.

    rows [o, K]: what followed each occurrence, GAP after its end. matches [o]: tokens that it
    matches. most: nodes. chain: without forks, always on to the most frequent child.
    """
    if not len(rows):
        return NO_GUESS
    order = np.lexsort(rows.T[::-1])
    rows, matches = rows[order], matches[order]
    tree = _prefix_tree(rows)
    best, kept, score = 0, np.empty(0, np.int64), 0.0
    for m in np.unique(matches)[::-1]:
        part = matches >= m
        counts = np.bincount(tree.nodes[part][tree.inside[part]], minlength=len(tree.tokens))
        shares = counts / part.sum()
        room = min(most, int(limits.factor * m + limits.offset))
        if chain:
            chosen = _heaviest_chain(tree, shares)[:room]
        else:
            # Shares fall along a path and ties go to the lower node, so parents come first.
            chosen = np.argsort(-shares, kind="stable")[:room]
        chosen = chosen[shares[chosen] >= limits.min_prob]
        # Whole counts, so that equal scores are equal and the longer match wins.
        total = float(counts[chosen].sum() / part.sum())
        if total > score:
            best, kept, score = int(m), chosen, total
    if not best:
        return NO_GUESS
    kept.sort()
    place = np.full(len(tree.tokens) + 1, -1, np.int64)
    place[kept] = np.arange(len(kept))
    draft = HostDraft(tree.tokens[kept], place[tree.parents[kept]], int(tree.depths[kept].max()))
    return Guess(draft, score)


@dataclass(frozen=True)
class _PrefixTree:
    """Prefixes of sorted rows in preorder. nodes [o, K]: prefix number of each cell, where
    `inside`. tokens, parents, depths [n].
    """

    nodes: NDArray[np.int64]
    inside: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]


def _prefix_tree(rows: NDArray[np.int64]) -> _PrefixTree:
    """rows [o, K] sorted. A cell begins a prefix if a row above differs in it or before it."""
    inside = rows != GAP
    new = inside.copy()
    new[1:] &= np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
    numbers = np.where(new, new.cumsum().reshape(new.shape) - 1, -1)
    nodes = np.maximum.accumulate(numbers, axis=0)
    above = np.concatenate([np.full((len(rows), 1), -1), nodes[:, :-1]], axis=1)
    depths = np.broadcast_to(np.arange(1, rows.shape[1] + 1), rows.shape)
    return _PrefixTree(nodes, inside, rows[new], above[new], depths[new])


def _heaviest_chain(tree: _PrefixTree, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """From the root always to the child of the largest share, the first of equals."""
    path: list[int] = []
    children = np.flatnonzero(tree.parents == -1)
    while len(children):
        path.append(int(children[shares[children].argmax()]))
        children = np.flatnonzero(tree.parents == path[-1])
    return np.array(path, np.int64)
