"""Log-probability of given items under the level heads, for a model that has nothing else."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recserve.core.request import Result
from recserve.core.sequence import Sequence
from recserve.core.strategy import Strategy
from recserve.kernels.host import on_device
from recserve.kernels.trie.item_scores import score_rows
from recserve.models.recommender import Recommender
from recserve.search.strategies.likelihood import (
    LikelihoodStrategy,
    likelihood_request,
    likelihood_results,
)


@dataclass(frozen=True)
class LevelLikelihoods:
    """Requests whose candidates are scored. scores [M], requests one after another."""

    sequences: tuple[Sequence, ...]
    scores: Tensor


class LevelLikelihoodStrategy(Strategy):
    """Log-probability of given items, the mean over their levels as in `rpg`; no tree."""

    def __init__(self, model: Recommender) -> None:
        self.model = model
        self.tables = model.level_tables()

    def start(self, sequences: Seq[Sequence]) -> LevelLikelihoods:
        """The whole answer."""
        tails = torch.stack([s.last_hidden for s in sequences if s.last_hidden is not None])
        requests = [likelihood_request(s) for s in sequences]
        rows = np.concatenate([r.rows for r in requests])
        owners = np.repeat(np.arange(len(requests)), [len(r.rows) for r in requests])
        log_probs, item_tokens = self.tables.log_probs(tails), self.model.item_tokens
        scores = score_rows(
            log_probs,
            item_tokens,
            on_device(owners, tails.device),
            on_device(rows, tails.device, torch.int64),
        )
        return LevelLikelihoods(tuple(sequences), scores)

    def finish(self, state: LevelLikelihoods) -> list[Result]:
        """Scores with the one task `likelihood`."""
        return likelihood_results(state.sequences, state.scores)


def likelihood_strategy(model: Recommender) -> Strategy:
    """Returns how a recommender scores given items: code after code, or all levels at once."""
    if model.config.autoregressive:
        return LikelihoodStrategy(model)
    return LevelLikelihoodStrategy(model)
