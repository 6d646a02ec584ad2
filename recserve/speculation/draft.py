"""A text draft, which is a tree of proposed tokens, and the budget that limits its size."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from recserve.kernels.tree import CANDIDATE


@dataclass(frozen=True)
class Budget:
    """Upper bounds of a draft.

    Attributes:
        num_nodes: Most nodes, auxiliary ones included.
        depth: Most levels below node 0.
    """

    num_nodes: int
    depth: int


class DrafterError(RuntimeError):
    """A drafter broke its contract with the scheduler. Only texts of that call fail."""


@dataclass(frozen=True)
class TextDraft:
    """Proposed tokens of one sequence, below its last committed token. n may be 0.

    A drawn draft has `probs`. A chosen draft has none: it is a function of the committed tokens
    (top-k, lookup), and siblings in it should differ.

    Attributes:
        tokens: [n] int64 token of each node.
        parents: [n] int64 index of each node's parent in this draft, in depth-first preorder. -1
            marks a child of the last committed token.
        depth: Most nodes on a path. A host number, so that packing needs no synchronisation. For a
            draft that lies on a device it may be an upper bound.
        probs: [n, V] float, the distribution that each node's token was drawn from, given its
            parent and its earlier siblings. Drawing without replacement gives those siblings
            probability 0. None for a chosen draft.
        kinds: [n] kinds of kernels.tree; None means all CANDIDATE.
        candidate_depth: Most candidates on a path; None means `depth`.
        may_fork: Whether nodes may be siblings although `depth`, a bound then, is the number of
            nodes.
        row: Row of the engine's captured drafts that holds it. None if it lies elsewhere.
        num_nodes: n.

    Raises:
        ValueError: If the columns differ in length.
    """

    tokens: Tensor
    parents: Tensor
    depth: int
    probs: Tensor | None = None
    kinds: Tensor | None = None
    candidate_depth: int | None = None
    may_fork: bool = False
    row: int | None = None
    num_nodes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n = self.tokens.shape[0]
        object.__setattr__(self, "num_nodes", n)  # read often; a tensor's shape is slow to read
        bare = self.probs is self.kinds is None
        if not bare or self.parents.shape[0] != n:
            self._check_columns(n)

    def _check_columns(self, n: int) -> None:
        for name in ("parents", "probs", "kinds"):
            column = getattr(self, name)
            if column is not None and column.shape[0] != n:
                raise ValueError(f"draft has {n} tokens but {column.shape[0]} {name}")

    def __len__(self) -> int:
        return self.num_nodes

    @property
    def is_chain(self) -> bool:
        """Whether no two nodes are siblings."""
        return self.depth == self.num_nodes and not self.may_fork

    @property
    def levels(self) -> int:
        """Most nodes on a path that may be accepted."""
        return self.depth if self.candidate_depth is None else self.candidate_depth

    @property
    def num_candidates(self) -> int:
        """Number of nodes that may be accepted."""
        kinds = self.kinds
        return self.num_nodes if kinds is None else int((kinds == CANDIDATE).sum())


def chain_draft(tokens: Tensor, probs: Tensor | None = None) -> TextDraft:
    """Returns a draft without forks.

    Args:
        tokens: [n] int64 tokens of the chain.
        probs: [n, V] distributions that the tokens were drawn from; None if they were chosen.
    """
    n = tokens.shape[0]
    parents = torch.arange(-1, n - 1, device=tokens.device)
    return TextDraft(tokens, parents, n, probs)


@lru_cache
def empty_draft(device: torch.device | str = "cpu") -> TextDraft:
    """Returns the shared empty draft of a device; a step with it is plain decoding."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return TextDraft(nothing, nothing, 0)
