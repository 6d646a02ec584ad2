"""Prompt lookup: what followed the last time the text ended like this.

    ... the cat sat on the mat ... then the cat sat | on the mat
            `--- the same n-gram                      `--- drafted

The longest suffix counts, and its newest occurrence first. A continuation that reaches the end of
the text goes on in what it has drafted, so that a text with a period is drafted to any length.
Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from recserve.core.text import Budget, TextContext, TextDraft, TextOutcome
from recserve.draft.draft_tree import DraftTree
from recserve.draft.host_draft import NOTHING, HostDraft, upload
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
        device: torch.device | str = "cpu",
        min_match: int = 2,
        max_match: int = 5,
        num_tokens: int = 8,
        branches: int = 1,
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"matches of {min_match} to {max_match} tokens; need 1 <= min <= max")
        if num_tokens < 1 or branches < 1:
            raise ValueError(f"num_tokens {num_tokens} and branches {branches} must be at least 1")
        self.device, self.lengths = device, range(min_match, max_match + 1)
        self.num_tokens, self.branches = num_tokens, branches
        self._texts: dict[int, TextIndex] = {}

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Continuations, longest match first."""
        drafts = [self._draft(c, b) for c, b in zip(contexts, budgets, strict=True)]
        return upload(drafts, self.device)

    def _draft(self, context: TextContext, budget: Budget) -> HostDraft:
        branches = 1 if only_chains(context) else self.branches
        budget = allowed(context, budget, self.num_tokens * branches)
        depth = min(budget.depth, budget.num_nodes)
        if context.speculation.num_tokens is None:
            depth = min(depth, self.num_tokens)
        if not depth:
            return NOTHING
        text = self._texts.setdefault(context.id, TextIndex(self.lengths))
        text.extend(context.tokens[len(text) :])
        tree, used = DraftTree(), 0
        seen: set[int] = set()
        for n in reversed(self.lengths):
            for end in text.ends(n, LOOKED_AT * branches):
                if end in seen or used == branches:
                    continue
                seen.add(end)
                before = len(tree)
                tree.add_path(continuation(text, end, depth), budget.num_nodes)
                used += len(tree) > before
        return tree.finish(tree.preorder())

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        """Nothing: the next proposal reads what was committed."""

    def forget(self, context_id: int) -> None:
        """Drop the sequence's index."""
        self._texts.pop(context_id, None)


def continuation(text: TextIndex, end: int, length: int) -> list[int]:
    """`length` tokens after position `end`, going on in themselves where the text is over."""
    known = min(length, text.stop - 1 - end)
    tokens = [text.token(end + 1 + i) for i in range(known)]
    for i in range(known, length):
        tokens.append(tokens[i - known])
    return tokens
