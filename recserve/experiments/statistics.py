"""Differences of latencies between arms, with intervals that survive autocorrelation.

Latencies of one server come in waves, so requests are not independent. A run is therefore cut into
contiguous time blocks that hold requests of both arms. In each block a score says how much more
often (or by how much) one arm was slow. If the arms are equal, swapping their names within a block
changes only the sign of its score; so the summed score is compared with sums under random signs.
This test is exact for `paired` and `blocks` designs, and holds for few blocks and heavy waves. In
`split` designs, where units stay in one arm, a two-way cluster-robust t test takes its place.

The interval holds every factor (or shift) by which the treatment's latencies can be divided without
the test noticing a difference. For a quantile the score counts requests above the pooled quantile,
so no density is estimated.

Why not a bootstrap: resampled blocks move a tail quantile up and down the waves that both arms
share, and its spread then says 2 % of false alarms for 5 % (benchmarks/experiments/ab_power.py).

Sources: Canay, Romano and Shaikh 2017, "Randomization tests under an approximate symmetry
assumption" (signs of cluster scores); Woodruff 1952 (quantile intervals by inversion); Cameron,
Gelbach and Miller 2011 (two-way clusters).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from recserve.experiments.blocks import Floats, Ints

SIGNS = 4000
TOLERANCE = 1e-3  # of the ends of an interval, in its half-width
MAX_DOUBLINGS = 12
# Standard errors at which the robust interval is taken; near the ends that are reported.
ROBUST_REACH = 2.0
SRM_ALARM = 0.001
Statistic = Literal["mean", "p50", "p90", "p99"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Effect:
    """Treatment against control in one statistic.

    Attributes:
        statistic: "mean", "p50", "p90" or "p99".
        control: Value in the control arm.
        treatment: Value in the treatment arm.
        absolute: Treatment minus control.
        relative: Treatment over control, minus 1.
        p_value: Of no difference.
        log_ratio: log(treatment / control).
        log_error: Standard error of the log ratio.
        num_blocks: Time blocks that the error rests on.
    """

    statistic: str
    control: float
    treatment: float
    absolute: Interval
    relative: Interval
    p_value: float
    log_ratio: float
    log_error: float
    num_blocks: int


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


def compare(
    observations: Observations,
    statistic: Statistic,
    confidence: float = 0.95,
) -> Effect:
    """Returns the effect on one statistic, with intervals by inverted sign tests of block scores.

    Args:
        observations: Values of both arms; both in at least two blocks.
        statistic: Which one.
        confidence: Of the intervals.

    Raises:
        ValueError: If an arm is empty, there are fewer than two blocks, or a value is not positive.
    """
    values, treated = observations.values, observations.treated
    if treated.all() or not treated.any() or observations.num_blocks < 2:
        blocks = observations.num_blocks
        raise ValueError(f"{len(values)} values in {blocks} blocks: expected both arms and two")
    if not values.min() > 0:
        raise ValueError(f"smallest value {values.min()}: latencies are above 0")
    scores = Scores(observations, statistic)
    units = observations.units
    degrees = observations.num_blocks - 1
    inflation = 1.0
    if units is not None:
        inflation = unit_inflation(observations, statistic)
        degrees = min(degrees, len(np.unique(units)) - 1)
    reach = float(stats.t.ppf((1 + confidence) / 2, degrees))
    control, treatment = scores.level(False), scores.level(True)
    ratio, change = float(np.log(treatment / control)), treatment - control

    def limit(score: Floats) -> float:
        if units is None:
            return sign_limit(score, confidence)
        return reach * inflation * robust_error(score)

    low, high = invert(scores.scaled, limit, ratio, 0.01)
    low_ms, high_ms = invert(scores.shifted, limit, change, 0.01 * control)
    plain = scores.scaled(0.0)
    if units is None:
        p_value = sign_test(plain)
    else:
        ratio_of_errors = abs(float(plain.sum())) / max(inflation * robust_error(plain), 1e-300)
        p_value = float(2 * stats.t.sf(ratio_of_errors, degrees))
    return Effect(
        statistic=statistic,
        control=control,
        treatment=treatment,
        absolute=Interval(change, min(low_ms, change), max(high_ms, change)),
        relative=Interval(
            estimate=float(np.expm1(ratio)),
            low=float(np.expm1(min(low, ratio))),
            high=float(np.expm1(max(high, ratio))),
        ),
        p_value=p_value,
        log_ratio=ratio,
        log_error=(high - low) / (2 * reach),
        num_blocks=observations.num_blocks,
    )


@dataclass(frozen=True)
class LogRatio:
    """log(treatment / control) of one statistic, with its cluster-robust standard error."""

    log_ratio: float
    log_error: float


def robust_estimate(observations: Observations, statistic: Statistic) -> LogRatio:
    """Returns the log ratio and an error from the width of an interval of two errors."""
    scores = Scores(observations, statistic)
    ratio = float(np.log(scores.level(True) / scores.level(False)))
    inflation = unit_inflation(observations, statistic) if observations.units is not None else 1.0
    low, high = invert(
        scores.scaled, lambda score: ROBUST_REACH * inflation * robust_error(score), ratio, 0.01
    )
    return LogRatio(log_ratio=ratio, log_error=(high - low) / (2 * ROBUST_REACH))


class Scores:
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


def sample_ratio_p(counts: tuple[int, ...], weights: tuple[float, ...] | None = None) -> float:
    """Returns the p-value of the chi-square test that units were divided as planned.

    A value below SRM_ALARM says that the assignment, or the loss of requests, depends on the arm.
    """
    total = sum(counts)
    if total == 0 or len(counts) < 2:
        return 1.0
    shares = np.array(weights if weights else [1.0] * len(counts))
    return float(stats.chisquare(counts, total * shares / shares.sum()).pvalue)
