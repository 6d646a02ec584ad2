"""Scores of label tokens after given texts: each text is a branch below the shared prefix."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from recserve.core.request import Scores, TextScoreQuery
from recserve.core.sequence import SearchSequence, request_of
from recserve.core.strategy import Draft, OneRoundStrategy, Results
from recserve.kernels.host import on_device
from recserve.kernels.tree import merge, root_branch
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel

# Rows per block of full-vocabulary logits; bounds memory.
LABEL_ROWS = 128


class TextScoreStrategy(OneRoundStrategy):
    """Scores labels after all texts with one tree of isolated branches, in one round."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def tree_capacity(self, request: TextScoreQuery) -> int:
        """Returns one node per token."""
        return len(request.tokens)

    def tree(self, sequences: Seq[SearchSequence]) -> Draft:
        """Returns all texts at once."""
        return propose_texts(
            [request_of(s, TextScoreQuery) for s in sequences], self.model.tokens.weight.device
        )

    def results(self, sequences: Seq[SearchSequence], draft: Draft, hidden: Tensor) -> Results:
        """Returns log-probabilities after the last token of each text, one column per label."""
        requests = [request_of(s, TextScoreQuery) for s in sequences]
        values, start = list[Tensor](), 0
        for request in requests:
            # Packed index of the last token of each text.
            last = on_device(request.offsets[1:] - 1 + start, hidden.device)
            labels = on_device(request.labels, hidden.device)
            values.append(label_scores(self.model, hidden[last], labels))
            start += len(request.tokens)
        return [
            Scores(own.cpu().numpy(), tuple(map(str, request.labels)), s.timing)
            for own, request, s in zip(values, requests, sequences, strict=True)
        ]


def propose_texts(requests: Seq[TextScoreQuery], device: torch.device) -> Draft:
    """Returns one isolated branch per text, which attends to the prefix and to itself."""
    trees = [root_branch(torch.from_numpy(r.tokens), torch.from_numpy(r.offsets)) for r in requests]
    tree = merge(trees).to(device)
    return Draft(tree, NodeInputs(tree.tokens))


def label_scores(model: LanguageModel, hidden: Tensor, labels: Tensor) -> Tensor:
    """Returns the log-probability of each label as the next token.

    Args:
        model: The language model.
        hidden: [M, E] states.
        labels: [K] token ids.

    Returns:
        [M, K] float32.
    """
    parts = [
        model.logits(rows).float().log_softmax(-1)[:, labels]
        for rows in torch.split(hidden, LABEL_ROWS)
    ]
    return torch.cat(parts)
