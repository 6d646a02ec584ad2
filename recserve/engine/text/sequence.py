"""A text under way: its tokens, its place in the cache, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.request import Timing
from recserve.speculation.completion import (
    Completion,
    FinishReason,
    SpeculationCounts,
    TextCommit,
    TextQuery,
    TokenLogprobs,
)
from recserve.speculation.draft import Budget, budget_of
from recserve.speculation.drafter import Drafter, TextContext
from recserve.speculation.logits_processor import TokenCounts

NO_SLOTS = torch.empty(0, dtype=torch.int64)
NO_BUDGET = Budget(0, 0)


@dataclass(eq=False)
class TextSequence:
    """State of one request between admission and answer.

    pages: held, in the order of the tokens; slots: of all of them, capacity: how many.
    num_computed: tokens whose keys and values exist; a text may step when all but the last are
    computed. last_hidden [E]: the final hidden state of the last computed one, None where it is not
    known; the next step may write where it lies. limit: most committed tokens that the model's
    positions allow, end: and the request. waits: what it begins with is being computed by another
    text. flawed: a state or logits of it are not finite. token_counts: None unless penalties need
    them.
    """

    request: TextQuery
    future: Future[Any]
    submitted_s: float
    context: TextContext
    drafter: Drafter
    limit: int
    token_counts: TokenCounts | None = None
    pages: list[int] = field(default_factory=list)
    slots: Tensor = NO_SLOTS
    capacity: int = 0
    num_computed: int = 0
    waits: bool = False
    flawed: bool = False
    last_hidden: Tensor | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    timing: Timing = field(default_factory=Timing)
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = min(self.context.num_prompt + self.request.params.max_tokens, self.limit)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.context.tokens)

    @property
    def missing(self) -> int:
        """Committed tokens to compute before the text may step."""
        return len(self.context.tokens) - 1 - self.num_computed

    @property
    def ready(self) -> bool:
        """Whether only the last committed token is left to compute."""
        return len(self.context.tokens) - 1 == self.num_computed

    def computed(
        self, length: int, last_hidden: Tensor | None, ranked: NDArray[np.int64] | None = None
    ) -> None:
        """Keys and values of the first `length` tokens exist, and drafters see the last state and
        what heads ranked from it.
        """
        context = self.context
        self.num_computed, self.last_hidden = length, last_hidden
        ready = len(context.tokens) - 1 == length
        context.hidden, context.ranked = (last_hidden, ranked) if ready else (None, None)

    def budget(self, most: int) -> Budget:
        """What a draft may cost. most: draft nodes where the request does not say how many."""
        wanted = self.request.speculation.num_tokens
        nodes = most if wanted is None else min(wanted, most)
        left = self.end - len(self.context.tokens) - 1
        # So many nodes cannot be deeper.
        return budget_of(nodes, min(left, nodes)) if left > 0 else NO_BUDGET

    def commit(
        self, tokens: list[int], logprobs: Seq[TokenLogprobs] = (), counted: bool = False
    ) -> Seq[int]:
        """Append what a step found until the text ends; returns what was appended.

        counted: the step has counted the tokens already, for texts that go on. Sets finish_reason
        at a stop token, at max_tokens, at the context limit, or when the request's listener asks
        for it.
        """
        request, written = self.request, self.context.tokens
        left = self.end - len(written)
        if len(tokens) >= left:
            tokens, self.finish_reason = tokens[:left], "length"
        if request.params.stop_token_ids:
            tokens = self._until_stop(tokens)
        written += tokens
        if self.token_counts is not None and not counted:
            self.token_counts.add(tokens)
        if logprobs:
            self.logprobs += logprobs[: len(tokens)]
        if request.on_commit is not None:
            news = TextCommit(tuple(tokens), tuple(logprobs[: len(tokens)]), self.finish_reason)
            if request.on_commit(news) and self.finish_reason is None:
                self.finish_reason = "stop"
        return tokens

    def _until_stop(self, tokens: list[int]) -> list[int]:
        """What stands before the first stop token; all of them where there is none."""
        stops = self.request.params.stop_token_ids
        for place, token in enumerate(tokens):
            if token in stops:
                self.finish_reason, self.stop_token = "stop", token
                return tokens[:place]
        return tokens

    def completion(self) -> Completion:
        """The answer; the text must have ended."""
        assert self.finish_reason is not None
        return Completion(
            tokens=np.array(self.context.tokens[self.context.num_prompt :], dtype=np.int64),
            finish_reason=self.finish_reason,
            stop_token=self.stop_token,
            logprobs=tuple(self.logprobs),
            counts=self.counts,
            timing=self.timing,
        )
