"""What became of a drafter's drafts: how deep they go, and how often each depth is kept.

Running averages over the last drafts of all texts, so that they follow what is written now.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

DEPTHS = 64
MEMORY = 256.0  # drafts that an average remembers
FIRST_CHANCE, FIRST_WEIGHT = 0.7, 4.0  # what is believed before anything was seen


class Chances:
    """Of one drafter. filled[d]: share of its full drafts that reach depth d + 1; width: nodes of a
    draft per level.
    """

    def __init__(self) -> None:
        self.filled = np.zeros(DEPTHS)
        self.width = 1.0
        # By how many texts drafted together (their bits), then by depth.
        self._milliseconds: dict[int, dict[int, float]] = {}
        self._kept, self._tried = np.zeros(DEPTHS), np.zeros(DEPTHS)
        self._proposals = 0

    @property
    def known(self) -> bool:
        """Whether it has drafted anything yet."""
        return bool(self._tried[0])

    @property
    def is_timed(self) -> bool:
        """Whether it is known what a draft takes."""
        return bool(self._milliseconds)

    @property
    def levels(self) -> int:
        """How deep its drafts go, but for one in a hundred."""
        return int(np.count_nonzero(self.filled > 0.01))

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

    def proposed(self, nodes: int, depth: int) -> None:
        """A draft that was free to be as large as the drafter likes."""
        self._proposals += 1
        share = max(1 / self._proposals, 1 / MEMORY)
        reached = np.arange(DEPTHS) < depth
        self.filled += share * (reached - self.filled)
        if depth:
            self.width += share * (nodes / depth - self.width)

    def judged(self, depth: int, kept: int) -> None:
        """A draft of so many levels, of which the path went through the first `kept`."""
        tried = slice(0, min(kept + 1, depth, DEPTHS))
        self._tried[tried] *= 1 - 1 / MEMORY
        self._kept[tried] *= 1 - 1 / MEMORY
        self._tried[tried] += 1
        self._kept[: min(kept, DEPTHS)] += 1

    def survival(self, levels: int) -> NDArray[np.float64]:
        """[levels] chance that the path goes through depth d + 1 of a draft that is so deep; a
        depth that was not seen has the chance of the one before it.
        """
        chances = np.empty(levels)
        before = FIRST_CHANCE
        counts = zip(self._kept[:levels].tolist(), self._tried[:levels].tolist(), strict=True)
        for depth, (kept, tried) in enumerate(counts):
            before = (kept + before * FIRST_WEIGHT) / (tried + FIRST_WEIGHT)
            chances[depth] = before
        return chances.cumprod()
