"""Drafts that match the future text with a given probability.

This engine and transformers' assisted generation get the same drafts. The text is known because it
was generated before without drafts. Whether a drafted token is right depends only on its position,
so both get the same right and wrong tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import CandidateGenerator

from recserve.speculation.draft import Budget, TextDraft, chain_draft, empty_draft
from recserve.speculation.drafter import Drafter, TextContext, TextOutcome


class Oracle:
    """Drafts chains of `length` tokens, each right with probability `agreement`.

    Attributes:
        texts: Prompt and output of every request, found by their beginning.
    """

    def __init__(self, agreement: float, length: int, vocab_size: int) -> None:
        self.agreement, self.length, self.vocab_size = agreement, length, vocab_size
        self.texts: list[list[int]] = []
        self.right = np.random.default_rng(0).random(65_536) < agreement

    def chain(self, tokens: Seq[int], most: int) -> list[int]:
        """Returns the draft after `tokens`, with at most `most` tokens.

        Raises:
            LookupError: If the text is unknown.
        """
        n = len(tokens)
        text = next((t for t in self.texts if t[:n] == list(tokens)), None)
        if text is None:
            raise LookupError(f"the oracle does not know this text of {n} tokens")
        ahead = range(n, min(n + most, len(text)))
        return [text[i] if self.right[i] else (text[i] + 1) % self.vocab_size for i in ahead]


class OracleDrafter(Drafter):
    """The oracle as a drafter of this engine."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            most = min(self.oracle.length, budget.num_nodes, budget.depth)
            tokens = self.oracle.chain(context.tokens, most) if most else []
            drafts.append(chain_draft(torch.tensor(tokens)) if tokens else empty_draft())
        return drafts

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        pass

    def forget(self, context_id: int) -> None:
        pass


class OracleCandidates(CandidateGenerator):  # type: ignore[misc]
    """The oracle as a candidate generator of transformers' assisted generation."""

    requires_model_outputs = False

    def __init__(self, oracle: Oracle, max_length: int) -> None:
        self.oracle, self.max_length = oracle, max_length

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Extends [1, n] tokens to [1, n + drafted]."""
        most = min(self.oracle.length, self.max_length - input_ids.shape[1] - 1)
        drafted = self.oracle.chain(input_ids[0].tolist(), most) if most > 0 else []
        return torch.cat([input_ids, input_ids.new_tensor([drafted])], dim=1), None

    def update_candidate_strategy(
        self, input_ids: Tensor, scores: Tensor, num_matches: int
    ) -> None:
        """Does nothing."""
