"""Beams that go down the trie several levels at a time, in C on a CPU."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.trie.native_search import (
    DenseCandidateScores,
    Levels,
    Limits,
    NativeSearch,
    States,
    passed_prefixes,
)
from recserve.kernels.trie.native_trie import Prefixes
from recserve.kernels.trie.trie_children import DEAD
from recserve.search.beams import Beams
from recserve.search.expansion import NO_BOUND


@dataclass(frozen=True)
class NativeDescent:
    """A search that is over. above: the beams it began with."""

    above: Beams
    levels: Levels

    @property
    def level(self) -> int:
        """The level it reached."""
        return self.levels.reached

    def at(self, level: int) -> Beams:
        """The beams of a level that it reached."""
        found, width = self.levels, self.levels.used[level]
        paths = found.paths[level, :, :width, :level]
        nodes, log_probs = paths[..., level - 1], found.log_probs[level, :, :width]
        return self.above.at(level, nodes, log_probs, paths)

    def scores_at(self, places: Seq[int]) -> list[float]:
        """[B] the score at each request's place from the best down, -inf past the last."""
        width = self.levels.used[self.level]
        last = self.levels.log_probs[self.level, :, :width].tolist()
        ranked = zip(last, places, strict=True)
        return [scores[place] if place < width else DEAD for scores, place in ranked]

    def passed(self, which: int, floors: Seq[float]) -> Tensor:
        """Keys (as in Scored) of the beams above the last level that reach their request's floor,
        each with all above it. which: KNOWN, MISSING or ANY, what is said of their states.
        """
        trie = self.above.trie
        return passed_prefixes(self.levels, self.above.level, trie.num_nodes, which, floors)


def native_search_of(beams: Beams, search: NativeSearch | None) -> NativeSearch | None:
    """What `descend` goes down by, None where these beams are not in its reach."""
    return search if dispatch.in_native(beams.last_hidden) else None


def descend(
    beams: Beams,
    search: NativeSearch,
    until: int,
    widths: Seq[int],
    stops: bool = False,
    contexts: Tensor | None = None,
) -> NativeDescent:
    """From the beams to level `until`, each request keeping so many; by what was scored for them,
    or by a recurrent head that reads `contexts` [B, L, E]. stops: at the first level of which a
    state is missing.
    """
    if contexts is None:
        states = States(beams.last_hidden, beams.scored.keys, beams.scored.hidden)
    else:
        states = States(beams.last_hidden, contexts=contexts)
    found = search(
        beams.trie.native,
        Prefixes(beams.log_probs, beams.paths),
        Limits(widths, _places(beams), beams.filters.each),
        states,
        until,
        _dense_candidates(beams),
        stops,
    )
    return NativeDescent(beams, found)


def _places(beams: Beams) -> list[int]:
    unscored = beams.dense_candidates is not None and beams.dense_candidates.log_probs is None
    if beams.places is None or unscored:
        return [-1] * beams.nodes.shape[0]
    return [-1 if place >= NO_BOUND else place for place in beams.places.flatten().tolist()]


def _dense_candidates(beams: Beams) -> DenseCandidateScores | None:
    dense_candidates = beams.dense_candidates
    if dense_candidates is None or dense_candidates.log_probs is None:
        return None
    return DenseCandidateScores(
        dense_candidates.rows,
        dense_candidates.valid,
        dense_candidates.scores,
        dense_candidates.share,
        dense_candidates.weights,
        dense_candidates.dense,
        beams.trie.leaf_rows,
    )
