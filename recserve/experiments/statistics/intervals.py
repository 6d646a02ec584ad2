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

from dataclasses import dataclass

import numpy as np
from scipy import stats

from recserve.experiments.statistics.blocks import Floats
from recserve.experiments.statistics.scores import (
    ROBUST_REACH,
    UNBOUNDED,
    BlockScores,
    Observations,
    Statistic,
    invert,
    robust_error,
    sign_limit,
    sign_test,
    unit_inflation,
)

SRM_ALARM = 0.001


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
        confidence: Of the intervals.
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
    confidence: float


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
    p_value = no_difference_p(observations, statistic)
    scores = BlockScores(observations, statistic)
    units = observations.units
    inflation, degrees = _spread(observations, statistic)
    reach = float(stats.t.ppf((1 + confidence) / 2, degrees))
    control, treatment = scores.level(False), scores.level(True)
    ratio, change = float(np.log(treatment / control)), treatment - control

    def limit(score: Floats) -> float:
        if units is None:
            return sign_limit(score, confidence)
        return reach * inflation * robust_error(score)

    end, end_ms = float(np.log(UNBOUNDED)), control * UNBOUNDED
    low, high = np.clip(invert(scores.scaled, limit, ratio, 0.01), -end, end)
    low_ms, high_ms = np.clip(
        invert(scores.shifted, limit, change, 0.01 * control), -end_ms, end_ms
    )
    return Effect(
        statistic=statistic,
        control=control,
        treatment=treatment,
        absolute=Interval(change, float(min(low_ms, change)), float(max(high_ms, change))),
        relative=Interval(
            estimate=float(np.expm1(ratio)),
            low=float(np.expm1(min(low, ratio))),
            high=float(np.expm1(max(high, ratio))),
        ),
        p_value=p_value,
        log_ratio=ratio,
        log_error=float(high - low) / (2 * reach),
        num_blocks=observations.num_blocks,
        confidence=confidence,
    )


def no_difference_p(observations: Observations, statistic: Statistic) -> float:
    """Returns the p-value of no difference between the arms, without intervals.

    Raises:
        ValueError: If an arm is empty, there are fewer than two blocks, or a value is not positive.
    """
    values, treated = observations.values, observations.treated
    if treated.all() or not treated.any() or observations.num_blocks < 2:
        blocks = observations.num_blocks
        raise ValueError(f"{len(values)} values in {blocks} blocks: expected both arms and two")
    if not values.min() > 0:
        raise ValueError(f"smallest value {values.min()}: latencies are above 0")
    scores = BlockScores(observations, statistic).scaled(0.0)
    if observations.units is None:
        return sign_test(scores)
    inflation, degrees = _spread(observations, statistic)
    errors = abs(float(scores.sum())) / max(inflation * robust_error(scores), 1e-300)
    return float(2 * stats.t.sf(errors, degrees))


def _spread(observations: Observations, statistic: Statistic) -> tuple[float, int]:
    """Returns by how much units widen errors, and the degrees of freedom of the errors."""
    degrees = observations.num_blocks - 1
    if observations.units is None:
        return 1.0, degrees
    inflation = unit_inflation(observations, statistic)
    return inflation, min(degrees, len(np.unique(observations.units)) - 1)


@dataclass(frozen=True)
class LogRatio:
    """log(treatment / control) of one statistic, with its cluster-robust standard error."""

    log_ratio: float
    log_error: float


def robust_estimate(observations: Observations, statistic: Statistic) -> LogRatio:
    """Returns the log ratio and an error from the width of an interval of two errors."""
    scores = BlockScores(observations, statistic)
    ratio = float(np.log(scores.level(True) / scores.level(False)))
    inflation = unit_inflation(observations, statistic) if observations.units is not None else 1.0
    low, high = invert(
        scores.scaled, lambda score: ROBUST_REACH * inflation * robust_error(score), ratio, 0.01
    )
    end = float(np.log(UNBOUNDED))
    width = float(min(high, end) - max(low, -end))
    return LogRatio(log_ratio=ratio, log_error=width / (2 * ROBUST_REACH))


def sample_ratio_p(counts: tuple[int, ...], weights: tuple[float, ...] | None = None) -> float:
    """Returns the p-value of the chi-square test that units were divided as planned.

    A value below SRM_ALARM says that the assignment, or the loss of requests, depends on the arm.
    """
    total = sum(counts)
    if total == 0 or len(counts) < 2:
        return 1.0
    shares = np.array(weights if weights else [1.0] * len(counts))
    return float(stats.chisquare(counts, total * shares / shares.sum()).pvalue)
