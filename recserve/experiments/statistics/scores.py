"""Block scores of two arms: how much slower the treatment was in each time block, and their tests.

If the arms are equal, swapping their names within a block changes only the sign of its score.
`intervals.py` says how intervals come from this, and names the sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from recserve.experiments.statistics.blocks import Floats, Ints

SIGNS = 4000
TOLERANCE = 1e-3  # of the ends of an interval, in its half-width
MAX_DOUBLINGS = 12
# An interval without an end, as a factor; it stays a number in JSON.
UNBOUNDED = 1e6
# Standard errors at which the robust interval is taken; near the ends that are reported.
ROBUST_REACH = 2.0
Statistic = Literal["mean", "p50", "p90", "p99"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)


@dataclass(frozen=True)
class Observations:
    """Values of two arms with their time blocks.

    Attributes:
        values: [n] values, above 0.
        treated: [n] whether the value is of the treatment arm.
        blocks: [n] number of the time block, from 0, without gaps.
        units: [n] number of the unit; None where units are drawn anew for each request.
    """

    values: Floats
    treated: NDArray[np.bool_]
    blocks: Ints
    units: Ints | None = None

    @property
    def num_blocks(self) -> int:
        """Number of time blocks."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0


class BlockScores:
    """Block scores of one statistic; they add up to more than zero if the treatment is slower."""

    def __init__(self, observations: Observations, statistic: Statistic) -> None:
        treated = observations.treated
        self.level_of = None if statistic == "mean" else quantile_level(statistic)
        self.arms = (observations.values[~treated], observations.values[treated])
        self.blocks = (observations.blocks[~treated], observations.blocks[treated])
        self.num_blocks = observations.num_blocks

    def level(self, treated: bool) -> float:
        """The statistic of one arm."""
        values = self.arms[treated]
        if self.level_of is None:
            return float(values.mean())
        return float(np.quantile(values, self.level_of))

    def scaled(self, log_factor: float) -> Floats:
        """[num_blocks] scores after the treatment's values are divided by a factor."""
        return self._scores(self.arms[1] * np.exp(-log_factor))

    def shifted(self, shift: float) -> Floats:
        """[num_blocks] scores after a shift is taken off the treatment's values."""
        return self._scores(self.arms[1] - shift)

    def _scores(self, treatment: Floats) -> Floats:
        control = self.arms[0]
        pooled = np.concatenate([control, treatment])
        if self.level_of is None:
            centre = pooled.mean()
            parts = [control - centre, treatment - centre]
        else:
            rank = min(int(self.level_of * len(pooled)), len(pooled) - 1)
            edge = np.partition(pooled, rank)[rank]
            share = float((pooled > edge).mean())
            parts = [(control > edge) - share, (treatment > edge) - share]
        sums = [
            np.bincount(blocks, part, minlength=self.num_blocks) / len(part)
            for blocks, part in zip(self.blocks, parts, strict=True)
        ]
        result: Floats = sums[1] - sums[0]
        return result


@lru_cache(maxsize=4)
def _signs(num_blocks: int) -> Floats:
    """[SIGNS, num_blocks] drawn signs, the same for every call."""
    drawn = np.random.default_rng(0)
    signs: Floats = drawn.integers(0, 2, (SIGNS, num_blocks)).astype(np.float64) * 2 - 1
    signs.flags.writeable = False
    return signs


def sign_limit(scores: Floats, confidence: float) -> float:
    """Returns the largest sum of scores that random signs reach with this confidence."""
    return float(np.quantile(np.abs(_signs(len(scores)) @ scores), confidence))


def robust_error(scores: Floats) -> float:
    """Returns the cluster-robust standard error of the sum of block scores."""
    n = len(scores)
    return float(np.sqrt(((scores - scores.mean()) ** 2).sum() * n / max(n - 1, 1)))


def sign_test(scores: Floats) -> float:
    """Returns the two-sided p-value of the sum of scores under random signs."""
    sums = np.abs(_signs(len(scores)) @ scores)
    reached = sums >= abs(scores.sum()) * (1 - 1e-12)
    return float((1 + reached.sum()) / (1 + SIGNS))


def invert(
    score: Callable[[float], Floats],
    limit: Callable[[Floats], float],
    estimate: float,
    step: float,
) -> tuple[float, float]:
    """Returns the smallest and the largest effect that the test does not refuse.

    Args:
        score: Block scores after an effect is taken off; their sum falls with it.
        limit: Largest sum that is not refused.
        estimate: Where the search starts.
        step: First distance that is tried.
    """

    def excess(effect: float, side: float) -> float:
        found = score(effect)
        return side * float(found.sum()) - limit(found)

    ends = []
    for side in (1.0, -1.0):
        inside, reach = estimate, step
        for _ in range(MAX_DOUBLINGS):
            outside = estimate - side * reach
            if excess(outside, side) > 0:
                break
            inside, reach = outside, 2 * reach
        else:
            ends.append(-side * np.inf)
            continue
        if excess(inside, side) >= 0:
            ends.append(inside)
            continue
        ends.append(
            float(
                optimize.brentq(
                    excess, outside, inside, args=(side,), xtol=TOLERANCE * reach, rtol=1e-9
                )
            )
        )
    return ends[0], ends[1]


def quantile_level(statistic: str) -> float:
    """Returns 0.99 for "p99"."""
    return int(statistic[1:]) / 100


def unit_inflation(observations: Observations, statistic: Statistic) -> float:
    """Returns by how much errors grow because a unit's requests resemble each other.

    With units that stay in one arm, the error of the difference has a part that time blocks do not
    show. The two-way variance (time and units, minus their intersection) of the linearised
    statistic is compared with the variance by time alone; densities cancel out of the ratio.
    """
    units = observations.units
    if units is None:
        return 1.0
    scores = np.empty(len(observations.values))
    for arm in (False, True):
        mine = observations.treated == arm
        part = observations.values[mine]
        if statistic == "mean":
            score = part - part.mean()
            scale = part.mean()
        else:
            level = quantile_level(statistic)
            score = (part <= np.quantile(part, level)) - level
            scale = 1.0
        scores[mine] = score / scale / len(part) * (1 if arm else -1)
    by_time = _cluster_variance(scores, observations.blocks)
    by_unit = _cluster_variance(scores, units)
    both = observations.blocks * (int(units.max()) + 1) + units
    crossed = _cluster_variance(scores, np.unique(both, return_inverse=True)[1].astype(np.int64))
    if by_time <= 0:
        return 1.0
    return float(np.sqrt(max(1.0, (by_time + by_unit - crossed) / by_time)))


def _cluster_variance(scores: Floats, clusters: Ints) -> float:
    sums = np.bincount(clusters, scores)
    n = len(np.unique(clusters))
    return float((sums**2).sum()) * n / max(n - 1, 1)
