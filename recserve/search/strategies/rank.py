"""The ranker: candidates as branches under the user."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recserve.core.request import RankQuery, Result, Scores
from recserve.core.sequence import Sequence
from recserve.core.strategy import Draft, TreeStrategy
from recserve.models.ranker import Ranker
from recserve.search.candidates import propose_branches


@dataclass(frozen=True)
class RankState:
    """Requests whose candidates are being ranked; logits [M, tasks] once they are."""

    sequences: tuple[Sequence, ...]
    logits: Tensor | None = None


class RankStrategy(TreeStrategy):
    """The ranker: candidates as branches under the user, one round."""

    def __init__(self, model: Ranker) -> None:
        self.model = model

    def tree_capacity(self, request: RankQuery) -> int:
        """One node per candidate."""
        return len(request.candidates)

    def start(self, sequences: Seq[Sequence]) -> RankState:
        """Nothing is known before the forward."""
        return RankState(tuple(sequences))

    def finished(self, state: RankState) -> bool:
        """True after the one forward."""
        return state.logits is not None

    def propose(self, state: RankState) -> Draft:
        """One isolated node per candidate."""
        return propose_branches([_request(s) for s in state.sequences])

    def verify(self, state: RankState, draft: Draft, slots: Tensor, hidden: Tensor) -> RankState:
        """Task heads on every candidate."""
        return replace(state, logits=self.model.heads(hidden).float())

    def finish(self, state: RankState) -> list[Result]:
        """Logits per task."""
        assert state.logits is not None
        parts = torch.split(
            state.logits.cpu(), [len(_request(s).candidates) for s in state.sequences]
        )
        tasks = self.model.config.tasks
        return [
            Scores(part.numpy(), tasks, s.timing)
            for part, s in zip(parts, state.sequences, strict=True)
        ]


def _request(sequence: Sequence) -> RankQuery:
    assert isinstance(sequence.request, RankQuery)
    return sequence.request
