"""Sequence: a request from submission to delivery, the engine's unit of work."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from recserve.core.client import LOCAL, Client
from recserve.core.request import Continuation, Request, Result, Timing
from recserve.core.slate_tree import TracedRound
from recserve.models.inputs import NodeInputs

RequestT = TypeVar("RequestT")
NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class CachedPrefix:
    """What the prefix cache stores with a whole prefix. All sequences on the prefix share it.

    Attributes:
        last_hidden: [E] state of the last token. None until it is computed.
        placeholder_states: [P, E] states of the placeholders. None until they are computed.
        drafter_states: [F] what a text's drafter reads of the last token. None if it reads nothing.
        draft: What a strategy keeps for its next request on the prefix. The engine does not read
            it.
    """

    last_hidden: Tensor | None = None
    placeholder_states: Tensor | None = None
    drafter_states: Tensor | None = None
    draft: object = None


@dataclass(eq=False, kw_only=True)
class Sequence:
    """A request from its submission to the delivery of its result.

    Attributes:
        request: The query.
        future: Receives the result.
        submitted_s: `time.monotonic()` at submission.
        model: Name of the scheduler that runs it.
        client: Who sent it.
        background: Whether it runs only while no other item request does.
        row: Its row of the slot table (engine/kv_cache.py). 0 while it has none.
        slots: [W] that row: pool slots of its pages, in order.
        pages: Pages that it holds a reference to, in the order of its tokens.
        num_computed: Tokens at its beginning with keys and values.
        last_hidden: [E] state of the last of them. None if it is not known.
        timing: Time and work so far.
        nonfinite: Whether a state or a score is not finite. Such a request fails.
    """

    request: Any
    future: Future[Any]
    submitted_s: float
    model: str
    client: Client = LOCAL
    background: bool = False
    row: int = 0
    slots: Tensor = NO_SLOTS
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    last_hidden: Tensor | None = None
    timing: Timing = field(default_factory=Timing)
    nonfinite: bool = False


@dataclass(eq=False, kw_only=True)
class SearchSequence(Sequence):
    """A request for items or scores.

    Attributes:
        strategy: The strategy that computes it (core/strategy.py).
        prefix_length: R, prefix tokens, computed or not. 0 while it waits.
        tree_slots: Pool slots reserved for tree nodes.
        tree_used: Number of `tree_slots` in use.
        rounds: Forwards that scored a node of the request's trees.
        placeholder_states: [P, E] states of the strategy's placeholders. None until they are
            computed.
        cached_prefix: What is cached with the prefix.
        chosen: Items that earlier searches chose for the request. None in the first search.
        traced: Prefixes that each forward scored, if the request wants an explanation.
    """

    request: Request
    future: Future[Result]
    strategy: Any
    prefix_length: int = 0
    tree_slots: Tensor = NO_SLOTS
    tree_used: int = 0
    rounds: int = 0
    placeholder_states: Tensor | None = None
    cached_prefix: CachedPrefix = field(default_factory=CachedPrefix)
    chosen: Continuation | None = None
    traced: list[TracedRound] = field(default_factory=list)

    @property
    def placeholders(self) -> NodeInputs | None:
        """Inputs that the strategy reads after the prefix. None: it reads none."""
        found: NodeInputs | None = self.strategy.placeholders
        return found

    @property
    def computed(self) -> bool:
        """True when the prefix and its placeholders need no further forward."""
        prefix = self.num_computed == self.prefix_length and (
            self.last_hidden is not None or not self.prefix_length
        )
        return prefix and (self.placeholders is None or self.placeholder_states is not None)

    def take_cached(self, length: int, num_computed: int, cached: CachedPrefix) -> None:
        """Starts with what is cached of the prefix, which has `length` tokens."""
        self.prefix_length, self.num_computed, self.cached_prefix = length, num_computed, cached
        self.last_hidden, self.placeholder_states = cached.last_hidden, cached.placeholder_states

    def search_again(self, again: Continuation) -> None:
        """Continues with another request on the same prefix; frees the slots of the old tree."""
        self.request, self.chosen, self.tree_used = again.request, again, 0

    def restart(self) -> None:
        """Forgets what was computed, after a failed step. What earlier searches chose stays."""
        self.num_computed, self.tree_used, self.nonfinite = 0, 0, False
        self.timing = Timing()

    def take_tree_slots(self, count: int) -> Tensor:
        """Returns [count] pool slots for nodes that the next forward computes.

        Raises:
            RuntimeError: If the count exceeds the reservation.
        """
        start = self.tree_used
        if start + count > self.tree_slots.shape[0]:
            raise RuntimeError(
                f"a draft of {count} nodes after {start} nodes exceeds the "
                f"{self.tree_slots.shape[0]} reserved slots"
            )
        self.tree_used += count
        return self.tree_slots[start : start + count]


def stacked_last_hidden(sequences: Seq[Sequence]) -> Tensor:
    """Returns the [B, E] states of the last prefix tokens of B sequences with computed prefixes."""
    states = [s.last_hidden for s in sequences if s.last_hidden is not None]
    assert len(states) == len(sequences), "a prefix is not computed"
    return torch.stack(states)


def request_of(sequence: SearchSequence, kind: type[RequestT]) -> RequestT:
    """Returns the sequence's request, which is of the kind that its strategy answers."""
    assert isinstance(sequence.request, kind)
    return sequence.request
