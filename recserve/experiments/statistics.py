"""Differences of latencies between arms, with intervals that survive autocorrelation.

Latencies of one server come in waves, so requests are not independent. A run is therefore cut into
contiguous time blocks that hold requests of all arms, and whole blocks are resampled. Arms share
the blocks, so a wave that hits both arms cancels out of their difference.

The interval is on the log scale (ratios of latencies are nearer to normal than differences), with
the standard deviation of the resampled log ratios and Student's t with one degree of freedom less
than blocks. benchmarks/experiments/ab_power.py tests its false-alarm rate on recorded latencies.

Sources: Künsch 1989 and Carlstein 1986 (block bootstrap); Bell and McCaffrey 2002 (t quantiles for
few clusters); Cameron, Gelbach and Miller 2011 (two-way clusters); Geyer 1992 (initial positive
sequence).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import fft, stats

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIN_BLOCKS = 30
MAX_BLOCKS = 200
# A block is this many times longer than latencies stay correlated.
BLOCK_TIMES = 10
RESAMPLES = 2000
GRID = 1024
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


def autocorrelation_time(series: Floats) -> float:
    """Returns the number of consecutive values that carry the information of one.

    It is 1 for independent values, at least 1 otherwise: one plus twice the sum of the
    autocorrelations, up to the first pair of lags whose sum is not positive (Geyer 1992).
    """
    n = len(series)
    centred = series - series.mean() if n else series
    power = float(np.dot(centred, centred))
    if n < 4 or power <= 0:
        return 1.0
    size = fft.next_fast_len(2 * n)
    spectrum = np.abs(fft.rfft(centred, size)) ** 2
    correlations = fft.irfft(spectrum, size)[: n // 2] / power
    pairs = correlations[: len(correlations) // 2 * 2].reshape(-1, 2).sum(axis=1)
    negative = np.flatnonzero(pairs <= 0)
    pairs = pairs[: negative[0]] if len(negative) else pairs
    return float(max(1.0, 2 * pairs.sum() - 1))


def effective_size(series: Floats) -> float:
    """Returns how many independent values say as much about the mean as these."""
    return len(series) / autocorrelation_time(series)


def count_blocks(num_values: int, correlation_time: float) -> int:
    """Returns the number of time blocks: as many as are long enough, from 30 to 200."""
    wanted = int(num_values / (BLOCK_TIMES * correlation_time))
    return max(2, min(max(wanted, MIN_BLOCKS), MAX_BLOCKS, num_values // 2))


def time_blocks(order: Ints, num_blocks: int) -> Ints:
    """Returns [n] block numbers: contiguous in time, with as many shots in each.

    Args:
        order: [n] number of the shot in time; calls of a pair share it and stay together.
        num_blocks: Number of blocks.
    """
    shots, places = np.unique(order, return_inverse=True)
    num_blocks = min(num_blocks, max(len(shots), 1))
    result: Ints = (places.astype(np.int64) * num_blocks) // max(len(shots), 1)
    return result


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


def block_weights(num_blocks: int, resamples: int, seed: int) -> Floats:
    """Returns [resamples, num_blocks]: how often each block is drawn with replacement."""
    drawn = np.random.default_rng(seed)
    shares = np.full(num_blocks, 1 / num_blocks)
    return drawn.multinomial(num_blocks, shares, size=resamples).astype(np.float64)


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
    left = np.clip(place - 1, 0, len(ranks) - 1)
    rows = np.arange(len(weights))
    low, high = below[rows, left], below[rows, right]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(high > low, (wanted - low) / (high - low), 0.0)
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
