"""Log-probability of given items."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recserve.core.request import LikelihoodQuery, Result, Scores
from recserve.core.sequence import Sequence
from recserve.core.strategy import Draft, TreeStrategy
from recserve.kernels.host import on_device
from recserve.models.recommender import Recommender
from recserve.search.candidates import propose_paths
from recserve.search.prefixes import PrefixDraft
from recserve.search.scored import nothing_scored
from recserve.search.scores import path_scores, root_scores
from recserve.search.strategies.beam import level_offsets_of


@dataclass(frozen=True)
class Likelihoods:
    """Requests whose candidates are being scored.

    trie_nodes [M, L], scores [M] so far, owners [M] the request of each candidate.
    """

    sequences: tuple[Sequence, ...]
    trie_nodes: Tensor
    scores: Tensor
    owners: Tensor
    draft: PrefixDraft | None


class LikelihoodStrategy(TreeStrategy):
    """Log-probability of given items: one tree of their merged semantic ids, one round."""

    def __init__(self, model: Recommender) -> None:
        self.model = model
        self.level_offsets = level_offsets_of(model)
        self.skip_single = model.config.normalization == "children"

    def tree_capacity(self, request: LikelihoodQuery) -> int:
        """A node for each prefix of each candidate, and no more than the trie has."""
        sizes = request.trie.level_sizes[1:-1]
        return sum(min(size, len(request.rows)) for size in sizes)

    def start(self, sequences: Seq[Sequence]) -> Likelihoods:
        """The first code's log-probability comes with the root."""
        requests = [likelihood_request(s) for s in sequences]
        trie = requests[0].trie
        rows = np.concatenate([r.rows for r in requests])
        nodes = trie.nodes_of_items(on_device(rows, trie.device, torch.int64))
        counts = [len(r.rows) for r in requests]
        owners = on_device(np.repeat(np.arange(len(requests)), counts), trie.device)
        tails = torch.stack([s.last_hidden for s in sequences if s.last_hidden is not None])
        scores = root_scores(trie, nodes, owners, tails, self.model)
        draft = propose_paths(
            trie, nodes, owners, len(sequences), self.level_offsets, self.skip_single
        )
        return Likelihoods(tuple(sequences), nodes, scores, owners, draft)

    def finished(self, state: Likelihoods) -> bool:
        """True when no prefix waits for its score."""
        return state.draft is None

    def propose(self, state: Likelihoods) -> Draft:
        """All prefixes at once."""
        assert state.draft is not None
        return state.draft

    def verify(
        self, state: Likelihoods, draft: PrefixDraft, slots: Tensor, hidden: Tensor
    ) -> Likelihoods:
        """Adds the log-probabilities of all codes after the first."""
        trie = likelihood_request(state.sequences[0]).trie
        scored = nothing_scored(hidden).add(*draft.computed(slots), hidden)
        deeper = path_scores(trie, state.trie_nodes, state.owners, scored, self.model)
        return replace(state, scores=state.scores + deeper, draft=None)

    def finish(self, state: Likelihoods) -> list[Result]:
        """Scores with the one task `likelihood`."""
        return likelihood_results(state.sequences, state.scores)


def likelihood_request(sequence: Sequence) -> LikelihoodQuery:
    """What the sequence asks."""
    assert isinstance(sequence.request, LikelihoodQuery)
    return sequence.request


def likelihood_results(sequences: Seq[Sequence], scores: Tensor) -> list[Result]:
    """scores [M], requests one after another."""
    sizes = [len(likelihood_request(s).rows) for s in sequences]
    parts = torch.split(scores.float().cpu()[:, None], sizes)
    return [
        Scores(part.numpy(), ("likelihood",), s.timing)
        for part, s in zip(parts, sequences, strict=True)
    ]
