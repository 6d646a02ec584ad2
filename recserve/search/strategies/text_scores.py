"""Label tokens after given texts: each text a branch under what they share."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from torch import Tensor

from recserve.core.request import Result, Scores, TextScoreQuery
from recserve.core.sequence import Sequence
from recserve.core.strategy import Draft, TreeStrategy
from recserve.kernels.host import on_device
from recserve.models.language_model import LanguageModel
from recserve.search.candidates import propose_texts
from recserve.search.scores import label_scores


@dataclass(frozen=True)
class TextScoreState:
    """values: one [M, K] per request, None until they are scored."""

    sequences: tuple[Sequence, ...]
    values: tuple[Tensor, ...] | None = None


class TextScoreStrategy(TreeStrategy):
    """One tree of isolated branches, one round."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def tree_capacity(self, request: TextScoreQuery) -> int:
        """A node per token."""
        return len(request.tokens)

    def start(self, sequences: Seq[Sequence]) -> TextScoreState:
        """Nothing is known from the root alone."""
        return TextScoreState(tuple(sequences))

    def finished(self, state: TextScoreState) -> bool:
        """True after the one round."""
        return state.values is not None

    def propose(self, state: TextScoreState) -> Draft:
        """All texts at once."""
        return propose_texts(
            [_request(s) for s in state.sequences], self.model.tokens.weight.device
        )

    def verify(
        self, state: TextScoreState, draft: Draft, slots: Tensor, hidden: Tensor
    ) -> TextScoreState:
        """The last token of each text predicts the label."""
        values = []
        start = 0
        for request in [_request(s) for s in state.sequences]:
            last = on_device(request.offsets[1:] - 1 + start, hidden.device)
            labels = on_device(request.labels, hidden.device)
            values.append(label_scores(self.model, hidden[last], labels))
            start += len(request.tokens)
        return replace(state, values=tuple(values))

    def finish(self, state: TextScoreState) -> list[Result]:
        """Log-probabilities, one column per label."""
        assert state.values is not None
        return [
            Scores(values.cpu().numpy(), tuple(map(str, _request(s).labels)), s.timing)
            for values, s in zip(state.values, state.sequences, strict=True)
        ]


def _request(sequence: Sequence) -> TextScoreQuery:
    assert isinstance(sequence.request, TextScoreQuery)
    return sequence.request
