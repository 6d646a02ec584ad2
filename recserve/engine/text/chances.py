"""What became of a drafter's drafts: how deep they go, and how often each depth is kept.

Running averages over the last drafts of all texts, so that they follow what is written now.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DEPTHS = 64
TRIES = 8  # drafts after which one that is always empty is known to be
MEMORY = 256.0  # drafts that an average remembers
FIRST_CHANCE, FIRST_WEIGHT = 0.7, 4.0  # what is believed before anything was seen


@dataclass
class _Level:
    """One depth of a drafter's drafts: how many could reach it and what share did; of those that
    were judged there, how many were kept. Sums in which older drafts count less.
    """

    proposals: int
    filled: float = 0.0
    tried: float = 0.0
    kept: float = 0.0


class Chances:
    """Of one drafter. width: nodes of a draft per level."""

    def __init__(self) -> None:
        self.width = 1.0
        # By how many texts drafted together (their bits), then by depth.
        self._milliseconds: dict[int, dict[int, float]] = {}
        # Plain numbers, as they change with every draft: arrays cost more, after a forward.
        self._levels: list[_Level] = []
        self._proposals = self._unbounded = 0

    @property
    def known(self) -> bool:
        """Whether it has drafted anything yet, or had the chance to often enough."""
        return bool(self._levels and self._levels[0].tried) or self._proposals >= TRIES

    @property
    def is_timed(self) -> bool:
        """Whether it is known what a draft takes."""
        return bool(self._milliseconds)

    @property
    def levels(self) -> int:
        """How deep its drafts go, but for one in a hundred."""
        return sum(level.filled > 0.01 for level in self._levels)

    @property
    def filled(self) -> NDArray[np.float64]:
        """[levels] share of its drafts that reach depth d + 1, if they may."""
        return np.array([level.filled for level in self._levels[: self.levels]])

    def timed(self, depth: int, texts: int, milliseconds: float) -> None:
        """What a call took that drafted so deep, at least one level, for so many texts."""
        known, own = self._milliseconds.setdefault(texts.bit_length(), {}), milliseconds / texts
        before = known.get(depth, own)
        # One that is far above the average was interrupted by something else.
        known[depth] = before + (min(own, 2 * before) - before) / 8

    def drafting_ms(self, levels: int, texts: int = 1) -> NDArray[np.float64]:
        """[levels] time for each of so many texts to draft to depth d + 1.

        What was never timed is taken as linear in the depth. For more texts than were ever timed a
        call is hoped to grow with their square root, for fewer to shrink with them: it is then soon
        tried, and timed.
        """
        wanted = np.arange(1, levels + 1)
        bits = texts.bit_length()
        nearest = min(self._milliseconds, key=lambda own: abs(own - bits), default=None)
        if nearest is None:
            return np.zeros(levels)
        timed = self._milliseconds[nearest]
        depths = np.array(sorted(timed), dtype=np.float64)
        known = np.array([timed[int(depth)] for depth in depths])
        between = np.interp(wanted, np.append(0.0, depths), np.append(0.0, known))
        beyond = known[-1] * wanted / depths[-1]
        own = np.where(wanted > depths[-1], beyond, between)
        return np.maximum.accumulate(own * math.sqrt(2.0 ** min(nearest - bits, 0)))

    def proposed(self, nodes: int, depth: int, levels: int) -> None:
        """A draft that was free to go so many levels deep."""
        while len(self._levels) < min(depth, DEPTHS):
            self._levels.append(_Level(self._unbounded))
        self._proposals += 1
        self._unbounded += levels >= DEPTHS
        for number, level in enumerate(self._levels[:levels]):
            level.proposals += 1
            share = max(1 / level.proposals, 1 / MEMORY)
            level.filled += share * ((number < depth) - level.filled)
        if depth:
            self.width += (nodes / depth - self.width) / min(self._proposals, MEMORY)

    def judged(self, depth: int, kept: int) -> None:
        """A draft of so many levels, of which the path went through the first `kept`."""
        while len(self._levels) < min(depth, DEPTHS):
            self._levels.append(_Level(self._unbounded))
        for number, level in enumerate(self._levels[: min(kept + 1, depth)]):
            level.tried += 1 - level.tried / MEMORY
            level.kept += (number < kept) - level.kept / MEMORY

    def survival(self, levels: int) -> NDArray[np.float64]:
        """[levels] chance that the path goes through depth d + 1 of a draft that is so deep; a
        depth that was not seen has the chance of the one before it.
        """
        chances: list[float] = []
        chance, before = 1.0, FIRST_CHANCE
        for number in range(levels):
            if number < len(self._levels):
                level = self._levels[number]
                before = (level.kept + before * FIRST_WEIGHT) / (level.tried + FIRST_WEIGHT)
            chance *= before
            chances.append(chance)
        return np.array(chances)
