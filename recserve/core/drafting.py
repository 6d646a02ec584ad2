"""Draft, and what a strategy is: the one page that drafters, verifiers and the engine agree on."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from recserve.core.finite import NotFinite
from recserve.core.request import Again, Result
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


class Strategy(Protocol):
    """How a kind of request becomes an answer: a drafter and a verifier over a shared state.

    A state covers several requests that step together. Implementations: search/strategies/.
    One may have `placeholders`, NodeInputs that `tree_room` counts: auxiliary nodes, a chain behind
    the root, computed in the root's own forward; their states are kept beside the cached root.
    """

    def tree_room(self, request: Any) -> int:
        """Most tree nodes that a request can have computed, over all rounds."""
        ...

    def start(self, sequences: Seq[Sequence]) -> Any:
        """State of requests whose roots are computed."""
        ...

    def finished(self, state: Any) -> bool:
        """True when nothing is left to score."""
        ...

    def propose(self, state: Any) -> Draft:
        """The trees to score next, at least one node in all."""
        ...

    def verify(self, state: Any, draft: Any, slots: Tensor, hidden: Tensor) -> Any:
        """Next state. slots [T]: pool slot of every node; hidden [Tq, E] of the computed nodes."""
        ...

    def finish(self, state: Any) -> Seq[Result | Again | NotFinite]:
        """Answers in the order of the sequences, what to search before there is one, or why there
        is none.
        """
        ...
