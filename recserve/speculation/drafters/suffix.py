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

from recserve.speculation.drafters.limits import allowed, only_chains
from recserve.speculation.drafters.lookup import ANCHORS, USUAL, Ask, SuffixLimits
from recserve.speculation.drafters.text_lookup import text_lookup
from recserve.speculation.text import Budget, TextContext, TextDraft, TextOutcome


class SuffixDrafter:
    """Each sequence's own text, and one store of outputs for all.

    capacity: tokens of the store, the oldest leave first; 0: no store. An output enters the store
    when its sequence ends or is set aside. A token takes 72 bytes, in the store (19 MB) and while
    its sequence runs, and memory for up to twice as many is taken ahead.
    """

    def __init__(
        self,
        limits: SuffixLimits = USUAL,
        capacity: int = 2**17,
    ) -> None:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity}; it must be at least 0")
        self.limits = limits
        self._lookup = text_lookup(ANCHORS, capacity, self.limits)
        self._contexts: dict[int, TextContext] = {}

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """The better of the two sources' guesses, the own text's at a tie."""
        asks = [self._ask(c, b) for c, b in zip(contexts, budgets, strict=True)]
        return self._lookup.suffixes(asks)

    def _ask(self, context: TextContext, budget: Budget) -> Ask:
        self._contexts[context.id] = context
        budget = allowed(context, budget, self.limits.num_tokens)
        depth = min(budget.depth, budget.num_nodes, self.limits.depth)
        branches = 1 if only_chains(context) else budget.num_nodes
        return Ask(context.id, context.tokens, budget.num_nodes, depth, branches)

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        """Nothing: the next proposal reads what was committed."""

    def forget(self, context_id: int) -> None:
        """Move the sequence's output to the store."""
        self._lookup.forget(context_id)
        context = self._contexts.pop(context_id, None)
        if context is not None and context.num_output:
            self._lookup.store(context.tokens[context.num_prompt :])
