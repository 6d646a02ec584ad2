"""Log-probabilities of a prompt's own tokens, and the mean of its hidden states."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from recserve.core.request import PromptQuery, PromptScores
from recserve.core.sequence import SearchSequence, request_of
from recserve.core.strategy import Draft, OneRoundStrategy, Results
from recserve.kernels.tree import merge, root_branch
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel

# Rows per block of full-vocabulary logits; bounds memory.
LOGIT_ROWS = 128


class PromptStrategy(OneRoundStrategy):
    """Computes the states of whole prompts in one round, each as a branch below an empty prefix."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def tree_capacity(self, request: PromptQuery) -> int:
        """Returns one node per token."""
        return len(request.tokens)

    def tree(self, sequences: Seq[SearchSequence]) -> Draft:
        """Returns all prompts at once."""
        branches = []
        for sequence in sequences:
            tokens = torch.from_numpy(request_of(sequence, PromptQuery).tokens)
            branches.append(root_branch(tokens, torch.tensor([0, len(tokens)])))
        tree = merge(branches).to(self.model.tokens.weight.device)
        return Draft(tree, NodeInputs(tree.tokens))

    def results(self, sequences: Seq[SearchSequence], draft: Draft, hidden: Tensor) -> Results:
        """Returns what each request asks for."""
        parts = torch.split(
            hidden, [len(request_of(sequence, PromptQuery).tokens) for sequence in sequences]
        )
        return [
            self._scores(request_of(sequence, PromptQuery), own, sequence)
            for sequence, own in zip(sequences, parts, strict=True)
        ]

    def _scores(
        self, request: PromptQuery, hidden: Tensor, sequence: SearchSequence
    ) -> PromptScores:
        mean = hidden.float().mean(0).cpu().numpy() if request.mean else None
        if request.num_top is None or len(request.tokens) == 1:
            return PromptScores(mean=mean, timing=sequence.timing)
        targets = torch.from_numpy(request.tokens[1:]).to(hidden.device)
        found: tuple[list[Tensor], ...] = ([], [], [], [])
        for rows, wanted in zip(
            torch.split(hidden[:-1], LOGIT_ROWS), torch.split(targets, LOGIT_ROWS), strict=True
        ):
            log_probs = self.model.logits(rows).float().log_softmax(-1)
            chosen = log_probs.gather(1, wanted[:, None])
            values, tokens = log_probs.topk(request.num_top, -1)
            ranks = (log_probs > chosen).sum(-1) + 1
            for column, part in zip(found, (chosen[:, 0], ranks, tokens, values), strict=True):
                column.append(part)
        columns = [torch.cat(column).cpu().numpy() for column in found]
        return PromptScores(
            mean=mean,
            chosen=columns[0],
            ranks=columns[1],
            top_tokens=columns[2],
            top_values=columns[3],
            timing=sequence.timing,
        )
