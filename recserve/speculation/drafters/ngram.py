"""Prompt lookup: what followed the last time the text ended like this.

    ... the cat sat on the mat ... then the cat sat | on the mat
            `--- the same n-gram                      `--- drafted

The longest suffix counts, and its newest occurrence first. A continuation that reaches the end of
the text goes on in what it has drafted, so that a text with a period is drafted to any length.
Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from recserve.speculation.drafters.limits import allowed, only_chains
from recserve.speculation.drafters.lookup import Ask
from recserve.speculation.drafters.text_lookup import text_lookup
from recserve.speculation.text import Budget, TextContext, TextDraft, TextOutcome


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
        self.num_tokens, self.branches = num_tokens, branches
        self._lookup = text_lookup(range(min_match, max_match + 1))

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Continuations, longest match first."""
        return self._lookup.ngrams(
            [self._ask(c, b) for c, b in zip(contexts, budgets, strict=True)]
        )

    def _ask(self, context: TextContext, budget: Budget) -> Ask:
        branches = 1 if only_chains(context) else self.branches
        budget = allowed(context, budget, self.num_tokens * branches)
        depth = min(budget.depth, budget.num_nodes)
        if context.speculation.num_tokens is None:
            depth = min(depth, self.num_tokens)
        return Ask(context.id, context.tokens, budget.num_nodes, depth, branches)

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        """Nothing: the next proposal reads what was committed."""

    def forget(self, context_id: int) -> None:
        """Drop the sequence's index."""
        self._lookup.forget(context_id)
