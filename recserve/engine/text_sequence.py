"""The state of a running text: its tokens, its pages, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.constraint import ConstraintError, Matcher
from recserve.core.request import PrefixKeys
from recserve.core.sequence import CachedPrefix, Sequence
from recserve.engine.text_step import StateRows
from recserve.speculation.completion import (
    Completion,
    FinishReason,
    SpeculationCounts,
    TextCommit,
    TextQuery,
    TokenLogprobs,
)
from recserve.speculation.draft import Budget, TextDraft
from recserve.speculation.drafter import Drafter, StateSpan, TextContext

NO_BUDGET = Budget(0, 0)


@dataclass(eq=False, kw_only=True)
class TextSequence(Sequence):
    """A request for a text.

    Attributes:
        drafter: Drafter of the text.
        context: The tokens and parameters that drafters see.
        limit: Most committed tokens that the model's positions allow.
        capacity: Number of slots of its pages.
        room: Most nodes of a draft that find pages in this step. None: it is not limited.
        waits: Whether another text is computing this text's beginning.
        last_hidden: As in `Sequence`. The next step may overwrite it.
        states: [m, F] what the drafter reads of the last m computed tokens, or where it lies. None
            if it reads nothing or the states are not known.
        num_read: Number of first positions whose states the drafter has received.
        paused: Whether the draft policy grants no draft in this step.
        end: Most committed tokens that the positions and the request allow.
        matcher: Automaton of the output of a constrained text, from its first step on. None if a
            limit was met: then it is made anew.
        fills_early: Whether masks of the text are never filled beside the forward pass, because one
            of them allowed no token.
        new_matcher: The matcher that is being made anew for a text without one.
    """

    request: TextQuery
    future: Future[Completion]
    context: TextContext
    drafter: Drafter
    limit: int
    capacity: int = 0
    room: int | None = None
    waits: bool = False
    states: Tensor | StateRows | None = None
    num_read: int = 0
    paused: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    end: int = field(init=False)
    matcher: Matcher | None = None
    new_matcher: Future[Matcher] | None = None
    fills_early: bool = False

    def __post_init__(self) -> None:
        self.end = min(self.context.num_prompt + self.request.params.max_tokens, self.limit)

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return len(self.context.tokens)

    @property
    def missing(self) -> int:
        """Number of committed tokens to compute before the text may step."""
        return len(self.context.tokens) - 1 - self.num_computed

    @property
    def ready(self) -> bool:
        """Whether only the last committed token is left to compute."""
        return len(self.context.tokens) - 1 == self.num_computed

    def prefix(self, length: int) -> PrefixKeys:
        """Returns the keys of the first tokens, with the name of a drafter that has its own."""
        drafter = self.request.speculation.drafter if self.drafter.reads_states else ""
        keys = np.array(self.context.tokens[:length], dtype=np.int64)
        return PrefixKeys(keys, drafter=drafter, salt=self.client.salt)

    def restore(self, length: int, cached: CachedPrefix | None) -> None:
        """Marks cached tokens as computed. `cached` is what is cached with all of them, if any."""
        self.states, self.num_read = None, length
        if cached is not None and cached.drafter_states is not None:
            # The drafter's entries of the cached rows reach to the state before the last one.
            self.states, self.num_read = cached.drafter_states[None], length - 1
        self.mark_computed(length, None if cached is None else cached.last_hidden)

    def to_cache(self) -> CachedPrefix:
        """Returns what to cache with the computed tokens, in memory of its own."""
        assert self.last_hidden is not None
        read = None if self.states is None else self.states[-1:][0].clone()
        return CachedPrefix(self.last_hidden.clone(), drafter_states=read)

    def mark_computed(
        self, length: int, last_hidden: Tensor | None, ranked: NDArray[np.int64] | None = None
    ) -> None:
        """Marks tokens as computed and passes the last state to drafters if the text is ready.

        Args:
            length: Number of tokens with keys and values.
            last_hidden: [E] final hidden state of the last of them. None if not known.
            ranked: [K, W] tokens that draft heads ranked from that state. None without heads.
        """
        context = self.context
        self.num_computed, self.last_hidden = length, last_hidden
        ready = len(context.tokens) - 1 == length
        context.hidden, context.ranked = (last_hidden, ranked) if ready else (None, None)

    def restart(self) -> None:
        """Forgets what was computed. The committed tokens stay."""
        self.num_computed = 0

    def take_unread(self, end: int) -> StateSpan | None:
        """Returns the states of positions before `end` that the drafter has not received.

        They count as received from now on.
        """
        if self.states is None or end <= self.num_read:
            return None
        first, start = self.num_read, self.num_computed - len(self.states)
        self.num_read = end
        return StateSpan(self.context, first, self.states[first - start : end - start])

    def take_ahead(self, end: int) -> StateSpan | None:
        """Returns the positions before `end` for a drafter that reads the states of no layer.

        They need not be computed, and count as received from now on.
        """
        first = self.num_read
        if end <= first:
            return None
        self.num_read = end
        return StateSpan(self.context, first, torch.empty(end - first, 0))

    @property
    def waiting(self) -> StateRows | None:
        """The unread states if a captured draft can read them, which it has to do in this step."""
        states, unread = self.states, self.num_computed - self.num_read
        if not isinstance(states, StateRows) or unread <= 0:
            return None
        if unread == len(states):
            return states
        return StateRows(states.source, states.drafter, states.nodes[-unread:])

    def take_waiting(self) -> tuple[int, StateRows | None]:
        """Returns `waiting` and its first position. They count as received from now on."""
        rows, first = self.waiting, self.num_read
        if rows is not None:
            self.num_read = self.num_computed
        return first, rows

    def budget(self, most: int) -> Budget:
        """Returns the budget of a draft. `most` limits its nodes if the request does not."""
        wanted = self.request.speculation.num_tokens
        nodes = most if wanted is None else min(wanted, most)
        if self.room is not None:
            nodes = min(nodes, self.room)
        left = self.end - len(self.context.tokens) - 1
        # A draft of n nodes has at most n levels.
        return Budget(nodes, min(left, nodes)) if left > 0 else NO_BUDGET

    def match(self) -> Matcher:
        """Returns the automaton of the output of a constrained text.

        Raises:
            ConstraintError: If it has to be made anew.
        """
        constraint = self.request.constraint
        assert constraint is not None
        if self.matcher is None:
            if self.context.num_output:
                raise ConstraintError("the matcher has met a limit")
            self.matcher = constraint.start()
        return self.matcher

    def commit(
        self,
        tokens: list[int],
        draft: TextDraft,
        logprobs: Seq[TokenLogprobs] = (),
    ) -> Seq[int]:
        """Appends verified tokens until the text ends, and returns the appended ones.

        Sets finish_reason at a stop token, at max_tokens, at the context limit, or when the
        request's listener returns True.

        Args:
            tokens: The verified tokens, the bonus token last.
            draft: The draft that was verified. May be empty.
            logprobs: Their log-probabilities. Empty if not requested.
        """
        request, written = self.request, self.context.tokens
        left, num_accepted = self.end - len(written), len(tokens) - 1
        if len(tokens) >= left:
            tokens, self.finish_reason = tokens[:left], "length"
        if request.params.stop_token_ids:
            tokens = self._until_stop(tokens)
        written += tokens
        if logprobs:
            self.logprobs += logprobs[: len(tokens)]
        num_accepted = min(num_accepted, len(tokens))
        num_candidates = draft.num_candidates if draft.num_nodes else 0
        if draft.num_nodes:
            self.counts.add(num_candidates, num_accepted, draft.levels)
        self.counts.num_paused_steps += self.paused
        if request.on_commit is not None:
            news = TextCommit(
                tokens=tuple(tokens),
                logprobs=tuple(logprobs[: len(tokens)]),
                finish_reason=self.finish_reason,
                num_accepted=num_accepted,
                num_draft_tokens=num_candidates,
                num_draft_levels=draft.levels,
                paused=self.paused,
            )
            if request.on_commit(news) and self.finish_reason is None:
                self.finish_reason = "stop"
        return tokens

    def _until_stop(self, tokens: list[int]) -> list[int]:
        """Returns the tokens before the first stop token, or all tokens if there is none."""
        stops = self.request.params.stop_token_ids
        for place, token in enumerate(tokens):
            if token in stops:
                self.finish_reason, self.stop_token = "stop", token
                return tokens[:place]
        return tokens

    def completion(self) -> Completion:
        """Returns the completion of a text that has ended."""
        assert self.finish_reason is not None
        return Completion(
            tokens=np.array(self.context.tokens[self.context.num_prompt :], dtype=np.int64),
            finish_reason=self.finish_reason,
            stop_token=self.stop_token,
            logprobs=tuple(self.logprobs),
            counts=self.counts,
            timing=self.timing,
        )


def context_of(request: TextQuery, number: int, salt: bytes = b"") -> TextContext:
    """Returns what drafters see of a client's request. `number` identifies its text."""
    tokens = request.prompt.tolist()
    return TextContext(
        id=number,
        tokens=tokens,
        num_prompt=len(tokens),
        params=request.params,
        speculation=request.speculation,
        salt=salt,
    )
