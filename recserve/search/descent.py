"""Beam search in C on a CPU, several levels per call."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from recserve.kernels.backend import Backend, backend_of
from recserve.kernels.trie.level_search import DEAD
from recserve.kernels.trie.native import Levels, NativeDescent, passed_prefixes
from recserve.search.beams import Beams
from recserve.search.expansion import NO_BOUND


@dataclass(frozen=True)
class Descent:
    """A finished search in C.

    Attributes:
        above: The beams that the search started from.
        levels: Beams of every level that the search reached.
    """

    above: Beams
    levels: Levels

    @property
    def level(self) -> int:
        """The deepest level that the search reached."""
        return self.levels.reached

    def at(self, level: int) -> Beams:
        """Returns the beams of a level that the search reached."""
        found, width = self.levels, self.levels.used[level]
        paths = found.paths[level, :, :width, :level]
        nodes, log_probs = paths[..., level - 1], found.log_probs[level, :, :width]
        return self.above.at(level, nodes, log_probs, paths)

    def scores_at(self, places: Seq[int]) -> list[float]:
        """Returns [B] the score at each request's rank, from 0, -inf past the last beam."""
        width = self.levels.used[self.level]
        last = self.levels.log_probs[self.level, :, :width].tolist()
        ranked = zip(last, places, strict=True)
        return [scores[place] if place < width else DEAD for scores, place in ranked]

    def passed(self, which: int, floors: Seq[float]) -> Tensor:
        """Returns keys of beams above the last level whose score reaches their request's floor.

        Args:
            which: KNOWN, MISSING or ANY: whether the beams' states were scored.
            floors: [B] smallest log-probability of each request.

        Returns:
            [n] keys (as in `Scored`). With a beam come all prefixes above it.
        """
        trie = self.above.trie
        return passed_prefixes(self.levels, self.above.level, trie.num_nodes, which, floors)


def native_search_of(beams: Beams, search: NativeDescent | None) -> NativeDescent | None:
    """Returns the search that `descend` can run on these beams, None if they are not on a CPU."""
    return search if backend_of(beams.last_hidden) is Backend.C else None


def descend(
    beams: Beams,
    search: NativeDescent,
    until: int,
    widths: Seq[int],
    stops: bool = False,
    contexts: Tensor | None = None,
) -> Descent:
    """Searches from the beams down to a level, in C.

    Logits come from the target's states in `beams.scored`, or from a recurrent head that reads
    `contexts`.

    Args:
        beams: The beams to start from.
        search: Search of the model or head.
        until: Level to reach.
        widths: Beam width of each request.
        stops: Whether to stop at the first level that lacks a state.
        contexts: [B, L, E] inputs of a recurrent head. None: use the target's states.
    """
    candidates, scored = beams.dense_candidates, beams.scored
    found = search(
        beams.trie,
        beams.log_probs,
        beams.paths,
        beams.last_hidden,
        until,
        widths=widths,
        bounds=_bounds(beams),
        filters=beams.filters.each,
        scored_keys=scored.keys if contexts is None else None,
        scored_hidden=scored.hidden if contexts is None else None,
        contexts=contexts,
        dense_candidates=None if candidates is None or candidates.log_probs is None else candidates,
        stops=stops,
    )
    return Descent(beams, found)


def _bounds(beams: Beams) -> list[int]:
    unscored = beams.dense_candidates is not None and beams.dense_candidates.log_probs is None
    if beams.places is None or unscored:
        return [-1] * beams.nodes.shape[0]
    return [-1 if place >= NO_BOUND else place for place in beams.places.flatten().tolist()]
