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
from recserve.core.target import TokenCounts
from recserve.core.text import Budget, Drafter, TextContext
from recserve.core.text_request import (
    Completion,
    FinishReason,
    SpeculationCounts,
    TextCommit,
    TextRequest,
    TokenLogprobs,
)

NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class TextSequence:
    """State of one request between admission and answer.

    pages: held, in the order of the tokens; slots: of all of them. num_computed: tokens whose keys
    and values exist; a text may step when all but the last are computed. tail [E]: the final hidden
    state of the last computed one, None where it is not known. limit: most committed tokens that
    the model's positions allow. waits: what it begins with is being computed by another text.
    token_counts: None unless penalties need them.
    """

    request: TextRequest
    future: Future[Any]
    submitted_s: float
    context: TextContext
    drafter: Drafter
    limit: int
    token_counts: TokenCounts | None = None
    pages: list[int] = field(default_factory=list)
    slots: Tensor = NO_SLOTS
    num_computed: int = 0
    waits: bool = False
    tail: Tensor | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    timing: Timing = field(default_factory=Timing)
    finish_reason: FinishReason | None = None
    stop_token: int | None = None

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.context.tokens)

    @property
    def missing(self) -> int:
        """Committed tokens to compute before the text may step."""
        return self.length - 1 - self.num_computed

    @property
    def ready(self) -> bool:
        """Whether only the last committed token is left to compute."""
        return not self.missing

    def computed(
        self, length: int, tail: Tensor | None, ranked: NDArray[np.int64] | None = None
    ) -> None:
        """Keys and values of the first `length` tokens exist, and drafters see the last state and
        what heads ranked from it.
        """
        self.num_computed, self.tail = length, tail
        self.context.hidden = tail if self.ready else None
        self.context.ranked = ranked if self.ready else None

    def budget(self, most: int) -> Budget:
        """What a draft may cost. most: draft nodes where the request does not say how many."""
        wanted = self.request.speculation.num_tokens
        left = self.request.params.max_tokens - self.context.num_output
        depth = max(min(left, self.limit - self.length) - 1, 0)
        return Budget((most if wanted is None else min(wanted, most)) if depth else 0, depth)

    def commit(self, tokens: Seq[int], logprobs: Seq[TokenLogprobs]) -> tuple[int, ...]:
        """Append what a step found until the text ends; returns what was appended.

        Sets finish_reason at a stop token, at max_tokens, at the context limit, or when the
        request's listener asks for it.
        """
        params = self.request.params
        room = min(params.max_tokens - self.context.num_output, self.limit - self.length)
        added = tuple(tokens[:room])
        if len(added) == room:
            self.finish_reason = "length"
        for place, token in enumerate(added) if params.stop_token_ids else ():
            if token in params.stop_token_ids:
                self.finish_reason, self.stop_token = "stop", token
                added = added[:place]
                break
        self.context.tokens += added
        if self.token_counts is not None:
            self.token_counts.add(added)
        self.logprobs += logprobs[: len(added)]
        if self.request.on_commit is not None:
            news = TextCommit(added, tuple(logprobs[: len(added)]), self.finish_reason)
            if self.request.on_commit(news) and self.finish_reason is None:
                self.finish_reason = "stop"
        return added

    def completion(self) -> Completion:
        """The answer; the text must have ended."""
        assert self.finish_reason is not None
        return Completion(
            np.array(self.context.tokens[self.context.num_prompt :], dtype=np.int64),
            self.finish_reason,
            self.stop_token,
            tuple(self.logprobs),
            self.counts,
            self.timing,
        )
