"""What turns the prefixes of requests into results: strategies, and the drafts they propose."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from recserve.core.draft_policy import DraftPolicy
from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Result
from recserve.core.sequence import SearchSequence
from recserve.kernels.tree import TokenTree
from recserve.models.inputs import NodeInputs

Results = Seq[Result | Continuation | NotFinite]


@dataclass(frozen=True)
class Draft:
    """Token trees to score in one forward, one tree per sequence, in the order of the sequences.

    Attributes:
        tree: The packed trees with T nodes.
        inputs: Model inputs of the Tq computed nodes.
        queries: [Tq] ascending indices of the nodes to compute. None: all nodes.
        scored: [T] pool slot of each node that an earlier round computed, -1 for the others. None:
            no node was computed before.
    """

    tree: TokenTree
    inputs: NodeInputs
    queries: Tensor | None = None
    scored: Tensor | None = None


class Strategy(ABC):
    """Turns the computed prefixes of requests into their results, in rounds of token trees.

    A round is `propose`, one forward pass, and `verify`. One state covers several requests that
    step together. Implementations: search/strategies/.

    Attributes:
        placeholders: Auxiliary nodes after the prefix, computed in the prefix's own forward. Their
            states stay with the cached prefix. None: there are none.
        policy: Decides about its drafts. None: it drafts nothing.
        captured_search: Name of the captured search that can compute its results. None: there is
            none. Each class names its own, because a subclass may search in another way.
    """

    placeholders: NodeInputs | None = None
    policy: DraftPolicy | None = None
    captured_search: ClassVar[str | None] = None

    def __init_subclass__(cls) -> None:
        """Makes sure that a class does not inherit `captured_search`."""
        super().__init_subclass__()
        cls.captured_search = vars(cls).get("captured_search")

    def tree_capacity(self, request: Any) -> int:
        """Returns the most tree nodes that a request can have computed, over all rounds."""
        return 0

    @abstractmethod
    def start(self, sequences: Seq[SearchSequence]) -> Any:
        """Returns the state of requests whose prefixes are computed."""

    def can_replay(self, sequences: Seq[SearchSequence]) -> bool:
        """Returns whether the captured search may compute these requests."""
        return True

    def after_replay(self, sequences: Seq[SearchSequence], search: Any) -> Any:
        """Returns the state of requests whose search is a replayed one, with its leaves."""
        return search

    @abstractmethod
    def is_finished(self, state: Any) -> bool:
        """Returns whether no node is left to score."""

    @abstractmethod
    def propose(self, state: Any) -> Draft:
        """Returns the trees to score next, with at least one node in total."""

    @abstractmethod
    def verify(self, state: Any, draft: Any, slots: Tensor, hidden: Tensor) -> Any:
        """Returns the next state, after one forward.

        Args:
            state: State of the requests.
            draft: The draft that `propose` returned for this state.
            slots: [T] pool slot of every node.
            hidden: [Tq, E] states of the computed nodes.
        """

    @abstractmethod
    def finish(self, state: Any) -> Results:
        """Returns one result per sequence, in their order: a result, a continuation or an error."""


@dataclass
class OneRound:
    """State of a `OneRoundStrategy`.

    Attributes:
        sequences: The requests.
        draft: Their trees. None: there are none.
        results: The results. None before the forward pass.
    """

    sequences: Seq[SearchSequence]
    draft: Draft | None
    results: Results | None = None


class OneRoundStrategy(Strategy):
    """A strategy that needs one tree per request, or none besides the prefix."""

    def tree(self, sequences: Seq[SearchSequence]) -> Draft | None:
        """Returns the trees to score. None or empty trees: the prefixes alone give the results."""
        return None

    @abstractmethod
    def results(self, sequences: Seq[SearchSequence], draft: Any, hidden: Any) -> Results:
        """Returns one result per sequence, in their order.

        Args:
            sequences: The requests. Their prefixes are computed.
            draft: What `tree` returned.
            hidden: [Tq, E] states of the draft's computed nodes. None if there are none.
        """

    def start(self, sequences: Seq[SearchSequence]) -> OneRound:
        """Makes the trees, or the results where no tree is needed.

        Only the trees are a draft. Results without a tree are those of the search, as in a replay.
        """
        began = time.perf_counter()
        state = OneRound(sequences, self.tree(sequences))
        drafted_ms = (time.perf_counter() - began) * 1e3
        for sequence in sequences:
            sequence.timing.draft_ms += drafted_ms
        if state.draft is None or not len(state.draft.inputs):
            state.results = self.results(sequences, state.draft, None)
        return state

    def is_finished(self, state: OneRound) -> bool:
        """Returns whether the results are there."""
        return state.results is not None

    def propose(self, state: OneRound) -> Draft:
        """Returns the trees."""
        assert state.draft is not None
        return state.draft

    def verify(self, state: OneRound, draft: Any, slots: Tensor, hidden: Tensor) -> OneRound:
        """Computes the results."""
        state.results = self.results(state.sequences, draft, hidden)
        return state

    def finish(self, state: OneRound) -> Results:
        """Returns the results."""
        assert state.results is not None
        return state.results
