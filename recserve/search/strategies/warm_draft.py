"""Drafts made before anybody asks: the first question of a user is proved in one round."""

from __future__ import annotations

from dataclasses import replace

from recserve.core.request import Result, Warmed
from recserve.core.root_notes import is_plain
from recserve.search import rerank
from recserve.search import verify as beam_verify
from recserve.search.beams import Beams
from recserve.search.kept import kept, trim
from recserve.search.strategies.beam import BeamStrategy


class WarmDraftStrategy(BeamStrategy):
    """Full beam search, of which only the draft is kept: the prefixes that prove the answer.

    They stay with the root, where `speculative` looks for what proved an earlier answer. For a
    question with a filter or caps nothing is kept.
    """

    def finished(self, state: Beams) -> bool:
        """True at once where such a draft is there already."""
        there = all(draft is not None and draft.trimmed for draft in kept(state.sequences))
        return there or super().finished(state)

    def finish(self, state: Beams) -> list[Result]:
        """What it took."""
        if state.scored.keys.shape[0] and all(is_plain(request) for request in state.requests):
            self._keep(state)
        return [Warmed(sequence.timing) for sequence in state.sequences]

    def _keep(self, state: Beams) -> None:
        """The same search among what was scored, which tells what of it the proof needs."""
        again = replace(self.start(state.sequences), scored=state.scored)
        again = rerank.with_rival_scores(again, self.model)
        found = beam_verify.search_scored(again, self.model, collect=True)
        if found.proven:
            trim(again, found.needed)
