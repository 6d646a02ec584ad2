"""The interface of acceptance rules, with their input and output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from recserve.core.plugins import Pluggable
from recserve.kernels.acceptance.acceptance import DraftProbs, Walk
from recserve.kernels.tree import TokenTree
from recserve.speculation.draft import TextDraft


class UnfitDraft(ValueError):
    """A draft that would bias the acceptance rule of its request."""


@dataclass(frozen=True)
class ScoredTrees:
    """Drafts of B sequences with the target's scores: the input of a verifier.

    p is the target's distribution, q the draft's.

    Attributes:
        tree: B packed trees with T nodes. The first node of each is the last committed token, and
            the only one of depth 0.
        depth: Most levels below node 0, a host number.
        target: Maps packed nodes [m] to logits [m, V] with every sampling parameter applied. Their
            softmax is the distribution p of the token after the node. Logits are -inf where p is 0;
            at temperature 0 they are -inf everywhere but at one token. If `greedy` is True, only
            the largest logit of a row counts.
        seeds: [B] int64 noise keys.
        lengths: [B] int64 committed lengths; a node of depth d predicts position `lengths + d`.
        vocab_size: V.
        probs: q, the distribution that each drawn node's token came from; None if all are chosen.
        greedy: True if every sequence has temperature 0.
        logits: [T, V] raw logits if p is softmax(logits / temperature); None if other sampling
            parameters matter.
        temperatures: [B] temperatures for `logits`; None together with it.
        fixed_shapes: True to draw at all nodes, so that no shape depends on a draw and the host
            does not synchronise. False draws only along the path.
        rules: [B] int64 number of each tree's rule if the rules differ (verifiers/registry.py).
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
    fixed_shapes: bool = False
    rules: Tensor | None = None


@dataclass(frozen=True)
class Accepted(Walk):
    """The accepted paths of B scored trees, in the form of the walks that find them.

    Attributes:
        packed: [B, 2 D + 5] the paths as `pack_paths` returns them, if the rule found them so.
    """

    packed: Tensor | None = None

    @staticmethod
    def unpack(packed: Tensor, depth: int) -> Accepted:
        """Returns paths of packed ones with at most `depth` accepted nodes."""
        nodes = depth + 1
        return Accepted(packed[:, :nodes], packed[:, nodes], packed[:, nodes + 1], packed)


class Verifier(Pluggable, ABC):
    """An acceptance rule: decides which drafted tokens become text.

    To add a rule, derive from this class in one file, and name the class in
    `verifiers/registry.py` or in the entry-point group `recserve.verifiers` of a distribution.

    Attributes:
        name: Name in requests.
        exact: True if the text has the target's distribution for every draft that passes `check`.
        only_chains: True if it refuses forks and auxiliary nodes.
        reads_probs: True if it compares the target with the distribution that a draft was drawn
            from. Such a rule accepts drawn drafts more often, or requires them.
        needs_probs: True if it refuses chosen drafts. Requests that combine it with a drafter that
            may choose are refused, unless the temperature is 0.
    """

    exact: ClassVar[bool] = True
    only_chains: ClassVar[bool] = False
    reads_probs: ClassVar[bool] = False
    needs_probs: ClassVar[bool] = False

    def check(self, draft: TextDraft) -> None:  # noqa: B027
        """Raises UnfitDraft if the draft would bias the rule."""

    @abstractmethod
    def verify(self, scored: ScoredTrees) -> Accepted:
        """Returns the accepted path of every tree, and the token after it."""
