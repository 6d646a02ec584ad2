"""The engine's unit of work: one request, its root in the cache, its room for tree nodes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recserve.core.prefix_metadata import PrefixMetadata
from recserve.core.request import Continuation, Request, Result, Timing
from recserve.models.inputs import NodeInputs


@dataclass(eq=False)
class Sequence:
    """State of one request between admission and answer.

    pages: page numbers it holds a reference to, root pages first. root_slots [R]: pool slots of its
    root. num_computed: root tokens already in the cache. last_hidden [E]: state of the last root
    token, None until it is computed. placeholders: what its strategy reads behind the root, None:
    nothing; placeholder_states [P, E]: their hidden states, None until they are computed. metadata:
    shared by all sequences on this root. tree_slots: reserved for tree nodes, of which tree_used
    are taken. rounds: forwards that scored a node of its trees. flawed: a state of its trees was
    not finite, so there will be no answer. chosen: by earlier searches for it, None: this is the
    first.
    """

    request: Request
    future: Future[Result]
    submitted_s: float
    pages: list[int]
    root_slots: Tensor
    num_computed: int
    last_hidden: Tensor | None
    tree_slots: Tensor
    tree_used: int = 0
    rounds: int = 0
    placeholders: NodeInputs | None = None
    placeholder_states: Tensor | None = None
    metadata: PrefixMetadata = field(default_factory=PrefixMetadata)
    timing: Timing = field(default_factory=Timing)
    flawed: bool = False
    chosen: Continuation | None = None

    @property
    def computed(self) -> bool:
        """True when the root, and what stands behind it, need no forward any more."""
        root = self.num_computed == self.root_length and (
            self.last_hidden is not None or not self.root_length
        )
        return root and (self.placeholders is None or self.placeholder_states is not None)

    @property
    def root_length(self) -> int:
        """R, all root tokens, computed or not."""
        return self.root_slots.shape[0]

    def search_again(self, again: Continuation) -> None:
        """Go on with another request on the same root; the slots of its tree are free again."""
        self.request, self.chosen, self.tree_used = again.request, again, 0

    def take_tree_slots(self, count: int) -> Tensor:
        """[count] slots for nodes about to be computed. Raises RuntimeError past the
        reservation.
        """
        start = self.tree_used
        if start + count > self.tree_slots.shape[0]:
            raise RuntimeError(
                f"a draft of {count} nodes after {start} exceeds the "
                f"{self.tree_slots.shape[0]} reserved"
            )
        self.tree_used += count
        return self.tree_slots[start : start + count]


def stacked_last_hidden(sequences: Seq[Sequence]) -> Tensor:
    """Returns the [B, E] states of the last root tokens of B sequences with computed roots."""
    states = [s.last_hidden for s in sequences if s.last_hidden is not None]
    assert len(states) == len(sequences), "a root is not computed"
    return torch.stack(states)
