"""Prompt lookup: drafts the continuation of the latest similar passage in the text itself.

    ... the cat sat on the mat ... then the cat sat | on the mat
            `--- the same n-gram                      `--- drafted

The drafter looks for the longest n-gram at the end of the text that occurred before, and takes its
newest occurrence. A continuation that reaches the end of the text repeats itself, so the drafter
can draft a periodic text to any length.

Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from recserve.drafters.shared.limits import limit_budget
from recserve.drafters.shared.token_string import RunningTexts
from recserve.speculation.draft import Budget, TextDraft, chain_draft, empty_draft
from recserve.speculation.drafter import Drafter, TextContext


class NgramDrafter(Drafter):
    """Drafts the continuation of the newest earlier occurrence of the text's last tokens.

    Args:
        min_match: Shortest n-gram to look up, in tokens.
        max_match: Longest n-gram to look up, in tokens.
        num_tokens: Length of a draft if the request sets none.

    Raises:
        ValueError: If a number is out of its range.
    """

    name = "ngram"

    def __init__(self, min_match: int = 2, max_match: int = 5, num_tokens: int = 8) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(
                f"min_match is {min_match} and max_match is {max_match}; "
                "need 1 <= min_match <= max_match"
            )
        if num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens}; it must be at least 1")
        self.min_match, self.max_match, self.num_tokens = min_match, max_match, num_tokens
        self._texts = RunningTexts()

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns one chain per context; the chain is empty if nothing matches."""
        return [self._draft(c, b) for c, b in zip(contexts, budgets, strict=True)]

    def _draft(self, context: TextContext, budget: Budget) -> TextDraft:
        text = self._texts.update(context)
        budget = limit_budget(context, budget, self.num_tokens)
        depth = min(budget.depth, budget.num_nodes)
        found = self._find_continuation(text)
        if not found or not depth:
            return empty_draft()
        repeated = (found * (1 + depth // len(found)))[:depth]
        return chain_draft(torch.tensor([ord(token) for token in repeated]))

    def _find_continuation(self, text: str) -> str:
        """Returns the continuation of the longest match; empty without a match.

        The newest occurrence of a longer n-gram is never newer than that of a shorter one. Each
        search therefore begins where the previous one ended.
        """
        stop = len(text) - 1
        found = ""
        for length in range(self.min_match, self.max_match + 1):
            start = text.rfind(text[-length:], 0, stop)
            if start < 0:
                break
            stop = start + length
            found = text[stop:]
        return found

    def forget(self, context_id: int) -> None:
        """Drops the sequence's text."""
        self._texts.forget(context_id)
