"""Differences of latencies between arms, with intervals that survive autocorrelation.

Latencies of one server come in waves, so requests are not independent. A run is therefore cut into
contiguous time blocks that hold requests of all arms, and whole blocks are resampled. Arms share
the blocks, so a wave that hits both arms cancels out of their difference.

The interval is on the log scale (ratios of latencies are nearer to normal than differences), with
the standard deviation of the resampled log ratios and Student's t with one degree of freedom less
than blocks. benchmarks/experiments/ab_power.py tests its false-alarm rate on recorded latencies.

Sources: Künsch 1989 and Carlstein 1986 (block bootstrap); Bell and McCaffrey 2002 (t quantiles for
few clusters); Cameron, Gelbach and Miller 2011 (two-way clusters).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from recserve.experiments.blocks import Floats, Ints

RESAMPLES = 1000
GRID = 512
# Half-width of the grid around a quantile, in standard errors of independent requests.
GRID_ERRORS = 12.0
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
    seed: int = 0,
) -> Effect:
    """Returns the effect on one statistic, with block-bootstrap intervals.

    Args:
        observations: Values of both arms; both in at least two blocks.
        statistic: Which one.
        confidence: Of the intervals.
        seed: Of the resampling.

    Raises:
        ValueError: If an arm is empty, there are fewer than two blocks, or a value is not positive.
    """
    values, treated = observations.values, observations.treated
    num_blocks = observations.num_blocks
    if treated.all() or not treated.any() or num_blocks < 2:
        raise ValueError(f"{len(values)} values in {num_blocks} blocks: expected both arms and two")
    if not values.min() > 0:
        raise ValueError(f"smallest value {values.min()}: latencies are above 0")
    weights = block_weights(num_blocks, RESAMPLES, seed)
    blocks = observations.blocks
    control, controls = _resample(values[~treated], blocks[~treated], weights, statistic)
    treatment, treatments = _resample(values[treated], blocks[treated], weights, statistic)
    usable = (controls > 0) & (treatments > 0)
    inflation = 1.0
    degrees = num_blocks - 1
    if observations.units is not None:
        inflation = unit_inflation(observations, statistic)
        degrees = min(degrees, len(np.unique(observations.units)) - 1)
    ratio = float(np.log(treatment / control))
    ratio_error = float(np.log(treatments[usable] / controls[usable]).std(ddof=1)) * inflation
    error = float((treatments[usable] - controls[usable]).std(ddof=1)) * inflation
    reach = float(stats.t.ppf((1 + confidence) / 2, degrees))
    relative = Interval(
        estimate=float(np.expm1(ratio)),
        low=float(np.expm1(ratio - reach * ratio_error)),
        high=float(np.expm1(ratio + reach * ratio_error)),
    )
    change = treatment - control
    return Effect(
        statistic=statistic,
        control=control,
        treatment=treatment,
        absolute=Interval(change, change - reach * error, change + reach * error),
        relative=relative,
        p_value=t_test(ratio, ratio_error, degrees),
        log_ratio=ratio,
        log_error=ratio_error,
        num_blocks=num_blocks,
    )


def t_test(estimate: float, error: float, degrees: int) -> float:
    """Returns the two-sided p-value; 1 for no difference without error."""
    if error <= 0:
        return 1.0 if estimate == 0 else 0.0
    return float(2 * stats.t.sf(abs(estimate) / error, degrees))


@lru_cache(maxsize=4)
def block_weights(num_blocks: int, resamples: int, seed: int) -> Floats:
    """Returns [resamples, num_blocks]: how often each block is drawn with replacement."""
    drawn = np.random.default_rng(seed)
    shares = np.full(num_blocks, 1 / num_blocks)
    weights = drawn.multinomial(num_blocks, shares, size=resamples).astype(np.float64)
    weights.flags.writeable = False  # shared by all callers
    return weights


def _resample(
    values: Floats, blocks: Ints, weights: Floats, statistic: Statistic
) -> tuple[float, Floats]:
    """The statistic and its value in each resample."""
    num_blocks = weights.shape[1]
    if statistic == "mean":
        sums = np.bincount(blocks, values, minlength=num_blocks)
        counts = np.bincount(blocks, minlength=num_blocks)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = (weights @ sums) / (weights @ counts)
        return float(values.mean()), np.nan_to_num(means)
    level = quantile_level(statistic)
    return float(np.quantile(values, level)), _resample_quantile(values, blocks, weights, level)


def quantile_level(statistic: str) -> float:
    """Returns 0.99 for "p99"."""
    return int(statistic[1:]) / 100


def _resample_quantile(values: Floats, blocks: Ints, weights: Floats, level: float) -> Floats:
    """[resamples] quantiles of resampled blocks.

    Only counts per block below a grid of order statistics are needed, so a resample costs one row
    of a matrix product whatever the number of values. Between grid points it interpolates.
    """
    n, num_blocks = len(values), weights.shape[1]
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    error = np.sqrt(level * (1 - level) / n)
    # Blocks that differ widen the spread of the quantile beyond that of independent values.
    spread = GRID_ERRORS * error * np.sqrt(_clustering(values, blocks, num_blocks, level))
    first = int(np.clip((level - spread) * n, 0, n - 1))
    last = int(np.clip(np.ceil((level + spread) * n), first, n - 1))
    ranks = np.unique(np.linspace(first, last, min(GRID, last - first + 1)).astype(np.int64))
    cells = np.searchsorted(ranks, np.arange(n), side="left")
    table = np.zeros((num_blocks, len(ranks) + 1))
    np.add.at(table, (blocks[order], cells), 1.0)
    counts = np.cumsum(table, axis=1)
    drawn = weights @ counts
    below, totals = drawn[:, :-1], drawn[:, -1]
    wanted = level * (totals - 1) + 1
    grid = ranked[ranks]
    place = (below < wanted[:, None]).sum(axis=1)
    right = np.clip(place, 0, len(ranks) - 1)
    rows = np.arange(len(weights))
    low, high = below[rows, np.maximum(place - 1, 0)], below[rows, right]
    # The largest drawn value below the wanted count; blocks that were not drawn leave gaps.
    left = np.clip((below < low[:, None]).sum(axis=1), 0, len(ranks) - 1)
    # Between neighbouring values the quantile moves within one count, as numpy's does; between
    # grid points that are further apart it is taken to move evenly.
    apart = np.where(ranks[-1] - ranks[0] >= len(ranks), high - low, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(high > low, (wanted - low) / apart, 0.0)
    result: Floats = grid[left] + np.clip(share, 0, 1) * (grid[right] - grid[left])
    return result


def _clustering(values: Floats, blocks: Ints, num_blocks: int, level: float) -> float:
    """Variance of the share below the quantile over that of independent values, at least 1."""
    below = (values <= np.quantile(values, level)) - level
    sums = np.bincount(blocks, below, minlength=num_blocks)
    return float(max(1.0, (sums**2).sum() / (len(values) * level * (1 - level))))


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
