"""Ranking of candidates: one tree node per candidate after the user's history."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from recserve.core.request import RankQuery, Scores
from recserve.core.sequence import SearchSequence, request_of
from recserve.core.strategy import Draft, OneRoundStrategy, Results
from recserve.kernels.tree import TokenTree
from recserve.models.inputs import NodeInputs
from recserve.models.ranker import Ranker


class RankStrategy(OneRoundStrategy):
    """Scores all candidates with the ranker in one round."""

    def __init__(self, model: Ranker) -> None:
        self.model = model

    def tree_capacity(self, request: RankQuery) -> int:
        """Returns one node per candidate."""
        return len(request.candidates)

    def tree(self, sequences: Seq[SearchSequence]) -> Draft:
        """Returns one isolated node per candidate."""
        return propose_branches([request_of(s, RankQuery) for s in sequences])

    def results(self, sequences: Seq[SearchSequence], draft: Draft, hidden: Tensor) -> Results:
        """Returns logits per task."""
        logits = self.model.heads(hidden).float().cpu()
        parts = torch.split(logits, [len(request_of(s, RankQuery).candidates) for s in sequences])
        tasks = self.model.config.tasks
        return [
            Scores(part.numpy(), tasks, s.timing) for part, s in zip(parts, sequences, strict=True)
        ]


def propose_branches(requests: Seq[RankQuery]) -> Draft:
    """Returns one isolated node per candidate.

    A candidate attends to itself and to the prefix rows older than its own exposure.
    """
    counts = torch.tensor([0, *(len(r.candidates) for r in requests)])
    inputs = NodeInputs.cat([r.candidates for r in requests])
    index = torch.arange(len(inputs))
    limits = None
    if any(r.prefix_limits is not None for r in requests):
        limits = torch.cat([_prefix_limits(r) for r in requests])
    tree = TokenTree(
        inputs.tokens,
        torch.full_like(index, -1),
        torch.zeros_like(index),
        index + 1,
        counts.cumsum(0),
        prefix_limits=limits,
    ).to(inputs.tokens.device)
    return Draft(tree, inputs)


def _prefix_limits(request: RankQuery) -> Tensor:
    if request.prefix_limits is None:
        return torch.full((len(request.candidates),), len(request.prefix.inputs))
    return torch.from_numpy(request.prefix_limits).to(torch.int64)
