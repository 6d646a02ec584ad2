"""Full beam search, its prefixes drafted ahead."""

from __future__ import annotations

import torch

from recserve.core.beams import Beams
from recserve.core.drafting import Draft
from recserve.core.request import RecommendRequest
from recserve.draft.nezha import likely_prefixes
from recserve.engine.strategies.beam import BeamStrategy, request_of
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.verify import beam as beam_verify
from recserve.verify import rerank

SPREAD = 4


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
        rivals = rerank.rival_keys(state)
        if state.finished or bool((state.rounds > 0).any()):
            return self._draft(state, rivals)
        widths = [self.spread * beam_verify.beam_width(request_of(s)) for s in state.sequences]
        likely = likely_prefixes(state, self.head, widths, self.skip_single)
        return self._draft(state, likely if rivals is None else torch.cat([likely, rivals]))
