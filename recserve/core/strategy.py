"""The two kinds of strategies, and the draft that a tree strategy proposes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recserve.core.acceptance_watch import DraftWatch
from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Result
from recserve.core.sequence import Sequence
from recserve.kernels.tree import TokenTree
from recserve.models.inputs import NodeInputs


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
    """Turns the computed roots of requests into their results, without trees.

    One state covers several requests that step together. Implementations: search/strategies/.

    Attributes:
        placeholders: Auxiliary nodes after the root, computed in the root's own forward. Their
            states stay with the cached root. None: there are none.
        watch: Acceptance of its drafts. None: it drafts nothing.
    """

    placeholders: NodeInputs | None = None
    watch: DraftWatch | None = None

    def tree_capacity(self, request: Any) -> int:
        """Returns the most tree nodes that a request can have computed, over all rounds."""
        return 0

    @abstractmethod
    def start(self, sequences: Seq[Sequence]) -> Any:
        """Returns the state of requests whose roots are computed."""

    @abstractmethod
    def finish(self, state: Any) -> Seq[Result | Continuation | NotFinite]:
        """Returns one result per sequence, in their order: a result, a continuation or an error."""


class TreeStrategy(Strategy):
    """A strategy that scores token trees in rounds of propose, forward and verify."""

    @abstractmethod
    def tree_capacity(self, request: Any) -> int:
        """Returns the most tree nodes that a request can have computed, over all rounds."""

    @abstractmethod
    def finished(self, state: Any) -> bool:
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
