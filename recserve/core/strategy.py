"""The two kinds of strategies, and the draft that one of them proposes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Result
from recserve.core.sequence import Sequence
from recserve.kernels.tree import TokenTree
from recserve.models.inputs import NodeInputs


@dataclass(frozen=True)
class Draft:
    """Trees to score in one forward, one per sequence, in the order of the sequences.

    inputs: what the model reads at the computed nodes, Tq rows.
    queries [Tq]: the nodes to compute, ascending; None: all nodes of the trees.
    scored [T]: pool slot of the nodes computed in an earlier round, -1 at the others; None: none
    were.
    """

    tree: TokenTree
    inputs: NodeInputs
    queries: Tensor | None = None
    scored: Tensor | None = None


class Strategy(ABC):
    """How a kind of request becomes an answer from the hidden states of its root alone.

    A state covers several requests that step together. Implementations: search/strategies/.

    Attributes:
        placeholders: Auxiliary nodes behind the root, computed in the root's own forward. Their
            states stay with the cached root. None: there are none.
    """

    placeholders: NodeInputs | None = None

    def tree_capacity(self, request: Any) -> int:
        """Returns the most tree nodes that a request can have computed, over all rounds."""
        return 0

    @abstractmethod
    def start(self, sequences: Seq[Sequence]) -> Any:
        """Returns the state of requests whose roots are computed."""

    @abstractmethod
    def finish(self, state: Any) -> Seq[Result | Continuation | NotFinite]:
        """Returns a result per sequence, in their order: an answer, a continuation, or an error."""


class TreeStrategy(Strategy):
    """A strategy that scores token trees in rounds: propose, forward, verify."""

    @abstractmethod
    def tree_capacity(self, request: Any) -> int:
        """Returns the most tree nodes that a request can have computed, over all rounds."""

    @abstractmethod
    def finished(self, state: Any) -> bool:
        """Returns whether nothing is left to score."""

    @abstractmethod
    def propose(self, state: Any) -> Draft:
        """Returns the trees to score next, at least one node in all."""

    @abstractmethod
    def verify(self, state: Any, draft: Any, slots: Tensor, hidden: Tensor) -> Any:
        """Returns the next state.

        Args:
            state: State of the requests.
            draft: What `propose` returned for it.
            slots: [T] pool slot of every node.
            hidden: [Tq, E] states of the computed nodes.
        """
