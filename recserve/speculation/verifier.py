"""What an acceptance rule is, what it decides on, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from recserve.core.plugins import Pluggable
from recserve.kernels.accept_reference import DraftProbs
from recserve.kernels.tree import TokenTree
from recserve.speculation.draft import TextDraft


class UnfitDraft(ValueError):
    """A draft on which the acceptance rule of its request would be biased."""


@dataclass(frozen=True)
class ScoredTrees:
    """Drafts of B sequences with what the target says of them: what a verifier decides on.

    tree: B trees; the first node of each is the last committed token, the only one of depth 0.
    depth: most levels below node 0, a host number.
    target: packed nodes [m] -> [m, V] logits with every sampling parameter applied, whose softmax
    is the distribution p of the token after the node; -inf where p is 0, and everywhere but at one
    token at temperature 0.
    probs: q, the distribution each drawn node's token came from. None where all are chosen.
    seeds [B], lengths [B] int64: noise is keyed by the seed; a node of depth d predicts position
    `lengths + d`. greedy: every sequence has temperature 0.
    logits [T, V]: raw, where the target is softmax(logits / temperature) and nothing else, with
    temperatures [B]; None where other parameters count. everywhere: draw at all nodes, so that no
    shape depends on what is drawn and the host is not asked; else only where the path comes by.
    rules [B] int64: numbers of the rules of each, where they differ (verifiers/registry.py).
    """

    tree: TokenTree
    depth: int
    target: Callable[[Tensor], Tensor]
    seeds: Tensor
    lengths: Tensor
    vocab_size: int
    probs: DraftProbs | None = None
    greedy: bool = False
    logits: Tensor | None = None
    temperatures: Tensor | None = None
    everywhere: bool = False
    rules: Tensor | None = None


@dataclass(frozen=True)
class Accepted:
    """What of B scored trees is kept.

    nodes [B, D + 1]: packed nodes of the kept path, node 0 of the tree first, -1 after its end.
    lengths [B]: drafted tokens kept, node 0 and bonus excluded. bonus [B]: token after the path.
    """

    nodes: Tensor
    lengths: Tensor
    bonus: Tensor


class Verifier(Pluggable, ABC):
    """An acceptance rule: decides which drafted tokens become text.

    To add a rule, derive from this class in one file, and name the class in
    `verifiers/registry.py` or in the entry-point group `recserve.verifiers` of a distribution.

    Attributes:
        name: What requests call it.
        exact: True if the text has the target's distribution, whatever was drafted.
        only_chains: True if it refuses forks and auxiliary nodes.
        reads_probs: True if it compares the target with what a draft was drawn from, so that drawn
            drafts are accepted more often, or are required.
    """

    exact: ClassVar[bool] = True
    only_chains: ClassVar[bool] = False
    reads_probs: ClassVar[bool] = False

    def check(self, draft: TextDraft) -> None:  # noqa: B027
        """Raises UnfitDraft for a draft on which the rule would be biased."""

    @abstractmethod
    def verify(self, scored: ScoredTrees) -> Accepted:
        """Returns the accepted path of every tree, and the token after it."""
