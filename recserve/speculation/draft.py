"""A draft of text: proposed tokens as a tree, and how large it may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from recserve.kernels.tree import CANDIDATE


@dataclass(frozen=True)
class Budget:
    """Most that a draft may cost: nodes in all (auxiliary ones too), and levels below node 0."""

    num_nodes: int
    depth: int


@lru_cache(maxsize=4096)
def budget_of(num_nodes: int, depth: int) -> Budget:
    """The same object for the same numbers: every text has a budget at every step."""
    return Budget(num_nodes, depth)


@dataclass(frozen=True)
class TextDraft:
    """Proposed tokens of one sequence, below its last committed token; n may be 0.

    tokens [n] int64, parents [n] int64 in depth-first preorder: index of the parent in this draft,
    -1 for a child of the last committed token. depth: the most nodes on a path, a host number so
    that packing needs no synchronisation.
    probs [n, V] float: the distribution each node's token was drawn from, given its parent and the
    siblings before it (without replacement: none of theirs). None for drafts that were chosen, a
    function of what is committed (top-k, lookup), whose siblings should differ.
    kinds [n]: kernels.tree.CANDIDATE or AUXILIARY; None: all CANDIDATE. proposers [n] int64: bit i
    is set where the drafter's i-th source proposed the node; None: it has one source. num_nodes: n.
    Raises ValueError where the columns do not fit each other.
    """

    tokens: Tensor
    parents: Tensor
    depth: int
    probs: Tensor | None = None
    kinds: Tensor | None = None
    proposers: Tensor | None = None
    num_nodes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n = self.tokens.shape[0]
        object.__setattr__(self, "num_nodes", n)  # asked for often, and slow to read of a tensor
        bare = self.probs is self.kinds is self.proposers is None
        if not bare or self.parents.shape[0] != n:
            self._check_columns(n)

    def _check_columns(self, n: int) -> None:
        for name in ("parents", "probs", "kinds", "proposers"):
            column = getattr(self, name)
            if column is not None and column.shape[0] != n:
                raise ValueError(f"draft has {n} tokens but {column.shape[0]} {name}")

    def __len__(self) -> int:
        return self.num_nodes

    @property
    def num_candidates(self) -> int:
        """Nodes that may be accepted."""
        kinds = self.kinds
        return self.num_nodes if kinds is None else int((kinds == CANDIDATE).sum())


def chain_draft(tokens: Tensor, probs: Tensor | None = None) -> TextDraft:
    """A draft without forks. tokens [n]; probs [n, V] where they were drawn."""
    n = tokens.shape[0]
    parents = torch.arange(-1, n - 1, device=tokens.device)
    return TextDraft(tokens, parents, n, probs)


@lru_cache
def empty_draft(device: torch.device | str = "cpu") -> TextDraft:
    """The draft that makes a step plain decoding; one for each device."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return TextDraft(nothing, nothing, 0)
