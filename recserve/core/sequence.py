"""Sequence: the engine's unit of work, with its cached root and its slots for tree nodes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recserve.core.request import Continuation, Request, Result, Timing
from recserve.core.slate_tree import TracedRound
from recserve.models.inputs import NodeInputs


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


@dataclass(eq=False)
class Sequence:
    """State of one request between admission and result.

    Attributes:
        request: The query.
        future: Receives the result.
        submitted_s: `time.monotonic()` at submission.
        pages: Page numbers that the sequence holds a reference to, root pages first.
        prefix_slots: [R] pool slots of the root.
        num_computed: Prefix tokens that are already in the cache.
        last_hidden: [E] state of the last root token. None until it is computed.
        tree_slots: Pool slots reserved for tree nodes.
        tree_used: Number of `tree_slots` in use.
        rounds: Forwards that scored a node of the request's trees.
        placeholders: Inputs that the strategy reads after the root. None: it reads none.
        placeholder_states: [P, E] states of the placeholders. None until they are computed.
        cached_prefix: What is cached with the root.
        timing: Time and work so far.
        flawed: True if a state of the trees was not finite. The request then fails.
        chosen: Items that earlier searches chose for the request. None in the first search.
        traced: Prefixes that each forward scored, if the request wants an explanation.
    """

    request: Request
    future: Future[Result]
    submitted_s: float
    pages: list[int]
    prefix_slots: Tensor
    num_computed: int
    last_hidden: Tensor | None
    tree_slots: Tensor
    tree_used: int = 0
    rounds: int = 0
    placeholders: NodeInputs | None = None
    placeholder_states: Tensor | None = None
    cached_prefix: CachedPrefix = field(default_factory=CachedPrefix)
    timing: Timing = field(default_factory=Timing)
    flawed: bool = False
    chosen: Continuation | None = None
    traced: list[TracedRound] = field(default_factory=list)

    @property
    def computed(self) -> bool:
        """True when the root and its placeholders need no further forward."""
        root = self.num_computed == self.root_length and (
            self.last_hidden is not None or not self.root_length
        )
        return root and (self.placeholders is None or self.placeholder_states is not None)

    @property
    def root_length(self) -> int:
        """Number of root tokens R, computed or not."""
        return self.prefix_slots.shape[0]

    def search_again(self, again: Continuation) -> None:
        """Continues with another request on the same root; frees the slots of the old tree."""
        self.request, self.chosen, self.tree_used = again.request, again, 0

    def take_over(self, earlier: Sequence) -> None:
        """Takes over what the searches before this one chose, after a step of `earlier` failed."""
        self.chosen, self.rounds, self.traced = earlier.chosen, earlier.rounds, earlier.traced

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
    """Returns the [B, E] states of the last root tokens of B sequences with computed roots."""
    states = [s.last_hidden for s in sequences if s.last_hidden is not None]
    assert len(states) == len(sequences), "a root is not computed"
    return torch.stack(states)
