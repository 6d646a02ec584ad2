"""Prompt lookup: what followed the last time the text ended like this.

    ... the cat sat on the mat ... then the cat sat | on the mat
            `--- the same n-gram                      `--- drafted

The longest suffix counts, and its newest occurrence first. A continuation that reaches the end of
the text goes on in what it has drafted, so that a text with a period is drafted to any length.
Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from recserve.core.text import Budget, TextContext, TextDraft, TextOutcome
from recserve.draft.draft_tree import DraftTree
from recserve.draft.host_draft import NOTHING, HostDraft, as_tensors, chain
from recserve.draft.limits import allowed, only_chains
from recserve.draft.text_index import TextIndex

LOOKED_AT = 8  # occurrences looked at for each branch that is wanted


class NgramDrafter:
    """min_match, max_match: length of the n-grams. num_tokens: length of a continuation.
    branches: most continuations that are merged into one tree.

    Raises ValueError for numbers out of their range.
    """

    def __init__(
        self,
        min_match: int = 2,
        max_match: int = 5,
        num_tokens: int = 8,
        branches: int = 1,
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"matches of {min_match} to {max_match} tokens; need 1 <= min <= max")
        if num_tokens < 1 or branches < 1:
            raise ValueError(f"num_tokens {num_tokens} and branches {branches} must be at least 1")
        self.lengths = range(min_match, max_match + 1)
        self.num_tokens, self.branches = num_tokens, branches
        self._texts: dict[int, TextIndex] = {}

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Continuations, longest match first."""
        drafts = [self._draft(c, b) for c, b in zip(contexts, budgets, strict=True)]
        return as_tensors(drafts)

    def _draft(self, context: TextContext, budget: Budget) -> HostDraft:
        branches = 1 if only_chains(context) else self.branches
        budget = allowed(context, budget, self.num_tokens * branches)
        depth = min(budget.depth, budget.num_nodes)
        if context.speculation.num_tokens is None:
            depth = min(depth, self.num_tokens)
        if not depth:
            return NOTHING
        text = self._texts.get(context.id)
        if text is None:
            text = self._texts[context.id] = TextIndex(self.lengths)
        text.extend(context.tokens[text.stop :])
        if branches == 1:
            end = next(self._ends(text, 1), None)
            return NOTHING if end is None else chain(continuation(text, end, depth))
        tree, used = DraftTree(), 0
        for end in dict.fromkeys(self._ends(text, LOOKED_AT * branches)):
            before = len(tree)
            tree.add_path(continuation(text, end, depth), budget.num_nodes)
            used += len(tree) > before
            if used == branches:
                break
        return tree.finish(tree.preorder())

    def _ends(self, text: TextIndex, most: int) -> Iterator[int]:
        """Where the end of the text stood before: long matches first, newest first."""
        for n in reversed(self.lengths):
            yield from text.ends(n, most)

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        """Nothing: the next proposal reads what was committed."""

    def forget(self, context_id: int) -> None:
        """Drop the sequence's index."""
        self._texts.pop(context_id, None)


def continuation(text: TextIndex, end: int, length: int) -> list[int]:
    """`length` tokens after position `end`, going on in themselves where the text is over."""
    known = min(length, text.stop - 1 - end)
    tokens = text.after(end, known)
    for i in range(known, length):
        tokens.append(tokens[i - known])
    return tokens
