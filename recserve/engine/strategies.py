"""The strategies: each joins one drafter and one verifier, and is chosen by name."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recserve.core.beams import Beams, nothing_scored
from recserve.core.drafting import Draft, Strategy
from recserve.core.request import LikelihoodRequest, RankRequest, RecommendRequest, Result, Scores
from recserve.core.sequence import Sequence
from recserve.draft import beam as beam_draft
from recserve.draft.candidates import propose_branches, propose_paths
from recserve.draft.nezha import likely_prefixes
from recserve.draft.prefixes import PrefixDraft
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.ranker import Ranker
from recserve.models.recommender import Recommender
from recserve.verify import beam as beam_verify
from recserve.verify import rerank
from recserve.verify.scores import path_scores, root_scores

SPREAD = 4


class BeamStrategy:
    """Full beam search, one level a round."""

    def __init__(self, model: Recommender) -> None:
        self.model = model
        self.level_offsets = _level_offsets(model)
        self.skip_single = model.config.normalization == "children"

    def tree_room(self, request: RecommendRequest) -> int:
        """W nodes at each level but the last, twice that where the dense head has its say."""
        nodes = beam_verify.beam_width(request) * (request.trie.num_levels - 1)
        return 2 * nodes if request.dense_weight else nodes

    def start(self, sequences: Seq[Sequence]) -> Beams:
        """Level 1 comes with the root's last hidden state."""
        beams = beam_verify.start(tuple(sequences), self.model)
        return rerank.with_rivals(beams, self.model)

    def finished(self, state: Beams) -> bool:
        """True when the beams are leaves and every item that competes is scored."""
        return state.finished and rerank.rival_keys(state, self.skip_single) is None

    def propose(self, state: Beams) -> Draft:
        """The prefixes that fork, and in the first round those of the dense head's best items."""
        return self._draft(state, rerank.rival_keys(state, self.skip_single))

    def verify(self, state: Beams, draft: PrefixDraft, slots: Tensor, hidden: Tensor) -> Beams:
        """As many levels deeper as the scored prefixes prove."""
        return beam_verify.verify(state, draft, slots, hidden, self.model)

    def finish(self, state: Beams) -> list[Result]:
        """Slates."""
        return list(rerank.finish(state, self.model))

    def _draft(self, state: Beams, extra: Tensor | None) -> Draft:
        return beam_draft.propose(state, self.level_offsets, self.skip_single, extra)


class SpeculativeStrategy(BeamStrategy):
    """Full beam search, its prefixes drafted ahead by the self-draft head.

    One forward scores the drafted tree; the verifier is that of `beam`, so the answer is the same
    and only the number of rounds differs. What the draft missed is scored in further rounds.
    """

    def __init__(self, model: Recommender, head: SelfDraftHead, spread: int = SPREAD) -> None:
        super().__init__(model)
        self.head = head
        self.spread = spread

    def tree_room(self, request: RecommendRequest) -> int:
        """`spread` W drafted nodes at each level but the last, and all of beam search's own."""
        drafted = self.spread * beam_verify.beam_width(request) * (request.trie.num_levels - 1)
        return drafted + super().tree_room(request)

    def propose(self, state: Beams) -> Draft:
        """At first all that the head thinks likely; in a repair round what is missing."""
        rivals = rerank.rival_keys(state, self.skip_single)
        if state.finished or bool((state.rounds > 0).any()):
            return self._draft(state, rivals)
        widths = [self.spread * beam_verify.beam_width(_recommend(s)) for s in state.sequences]
        likely = likely_prefixes(state, self.head, self.level_offsets, widths, self.skip_single)
        return self._draft(state, likely if rivals is None else torch.cat([likely, rivals]))


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


class LikelihoodStrategy:
    """Log-probability of given items: one tree of their merged semantic ids, one round."""

    def __init__(self, model: Recommender) -> None:
        self.model = model
        self.level_offsets = _level_offsets(model)
        self.skip_single = model.config.normalization == "children"

    def tree_room(self, request: LikelihoodRequest) -> int:
        """A node for each prefix of each candidate, and no more than the trie has."""
        starts = request.trie.level_starts
        sizes = [starts[n + 1] - starts[n] for n in range(1, request.trie.num_levels)]
        return sum(min(size, len(request.rows)) for size in sizes)

    def start(self, sequences: Seq[Sequence]) -> Likelihoods:
        """The first code's log-probability comes with the root."""
        requests = [_likelihood(s) for s in sequences]
        trie = requests[0].trie
        rows = np.concatenate([r.rows for r in requests])
        nodes = trie.nodes_of_items(torch.from_numpy(rows).to(trie.device, torch.int64))
        counts = torch.tensor([len(r.rows) for r in requests], device=trie.device)
        owners = torch.repeat_interleave(counts)
        tails = torch.stack([s.tail for s in sequences if s.tail is not None])
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
        trie = _likelihood(state.sequences[0]).trie
        assert draft.query_keys is not None and draft.queries is not None
        scored = nothing_scored(hidden).add(draft.query_keys, slots[draft.queries], hidden)
        deeper = path_scores(trie, state.trie_nodes, state.owners, scored, self.model)
        return replace(state, scores=state.scores + deeper, draft=None)

    def finish(self, state: Likelihoods) -> list[Result]:
        """Scores with the one task `likelihood`."""
        sizes = [len(_likelihood(s).rows) for s in state.sequences]
        parts = torch.split(state.scores.float().cpu()[:, None], sizes)
        return [
            Scores(part.numpy(), ("likelihood",), s.timing)
            for part, s in zip(parts, state.sequences, strict=True)
        ]


@dataclass(frozen=True)
class Rankings:
    """Requests whose candidates are being ranked; logits [M, tasks] once they are."""

    sequences: tuple[Sequence, ...]
    logits: Tensor | None = None


class RankStrategy:
    """The ranker: candidates as branches under the user, one round."""

    def __init__(self, model: Ranker) -> None:
        self.model = model

    def tree_room(self, request: RankRequest) -> int:
        """One node per candidate."""
        return len(request.candidates)

    def start(self, sequences: Seq[Sequence]) -> Rankings:
        """Nothing is known before the forward."""
        return Rankings(tuple(sequences))

    def finished(self, state: Rankings) -> bool:
        """True after the one forward."""
        return state.logits is not None

    def propose(self, state: Rankings) -> Draft:
        """One isolated node per candidate."""
        return propose_branches([_rank(s) for s in state.sequences])

    def verify(self, state: Rankings, draft: Draft, slots: Tensor, hidden: Tensor) -> Rankings:
        """Task heads on every candidate."""
        return replace(state, logits=self.model.heads(hidden).float())

    def finish(self, state: Rankings) -> list[Result]:
        """Logits per task."""
        assert state.logits is not None
        parts = torch.split(state.logits.cpu(), [len(_rank(s).candidates) for s in state.sequences])
        tasks = self.model.config.tasks
        return [
            Scores(part.numpy(), tasks, s.timing)
            for part, s in zip(parts, state.sequences, strict=True)
        ]


def recommend_strategies(model: Recommender, head: SelfDraftHead | None) -> dict[str, Strategy]:
    """A recommender's strategies by name; without a self-draft head there is no speculation."""
    strategies: dict[str, Strategy] = {"beam": BeamStrategy(model)}
    if head is not None:
        strategies["speculative"] = SpeculativeStrategy(model, head)
    return strategies


def _level_offsets(model: Recommender) -> Tensor:
    return torch.tensor(model.config.level_offsets, device=model.tokens.weight.device)


def _recommend(sequence: Sequence) -> RecommendRequest:
    assert isinstance(sequence.request, RecommendRequest)
    return sequence.request


def _likelihood(sequence: Sequence) -> LikelihoodRequest:
    assert isinstance(sequence.request, LikelihoodRequest)
    return sequence.request


def _rank(sequence: Sequence) -> RankRequest:
    assert isinstance(sequence.request, RankRequest)
    return sequence.request
