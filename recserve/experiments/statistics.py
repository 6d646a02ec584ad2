"""Statistics of latencies and slates: time blocks, tests, intervals, and looks before the end.

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

A fixed-sample interval covers with 95 % at one planned end. Looking at it again and again and
stopping when it excludes zero gives far more than 5 % of false alarms. A confidence sequence covers
with 95 % at all looks together, so a run may stop early. Time blocks are its observations: their
log ratios are close to independent.

Sources: Canay, Romano and Shaikh 2017, "Randomization tests under an approximate symmetry
assumption" (signs of cluster scores); Woodruff 1952 (quantile intervals by inversion); Cameron,
Gelbach and Miller 2011 (two-way clusters); Geyer 1992, "Practical Markov chain Monte Carlo"
(initial positive sequence); Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024, "Time-uniform
central limit theory and asymptotic confidence sequences", Annals of Statistics 52(6), theorem 2.2
and section 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import fft, optimize, stats

# Looks before this block are not reported: the sequence is asymptotic.
FIRST_LOOK = 10
MAX_LOOKS = 40
# Time blocks of a run that may stop early. Their length is fixed before the run.
PLANNED_BLOCKS = 60
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MIN_BLOCKS = 30
MAX_BLOCKS = 200
# A block is this many times longer than the arms' difference stays correlated.
BLOCK_TIMES = 10
GROUP_SHOTS = 8
SRM_ALARM = 0.001
SIGNS = 4000
TOLERANCE = 1e-3  # of the ends of an interval, in its half-width
MAX_DOUBLINGS = 12
# An interval without an end, as a factor; it stays a number in JSON.
UNBOUNDED = 1e6
# Standard errors at which the robust interval is taken; near the ends that are reported.
ROBUST_REACH = 2.0
Statistic = Literal["mean", "p50", "p90", "p99"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
FAILED_REQUESTS = "failed requests"
Outcome = Literal["pass", "fail", "unclear"]


def boundary(time: float, rho: float, alpha: float = 0.05) -> float:
    """Returns the half-width of the confidence sequence, in standard errors of the estimate.

    Args:
        time: Observations so far, or information (one over the squared standard error).
        rho: Where the sequence is tightest; see `tuned_rho`.
        alpha: Share of runs in which the truth may leave the sequence at any time.
    """
    scaled = time * rho**2
    width = 2 * (scaled + 1) / scaled * math.log(math.sqrt(scaled + 1) / alpha)
    return math.sqrt(width)


def tuned_rho(time: float, alpha: float = 0.05) -> float:
    """Returns the rho whose sequence is tightest after that time (section 2.4)."""
    log = -2 * math.log(alpha)
    return math.sqrt((log + math.log(log + 1)) / time)


@dataclass(frozen=True)
class Look:
    """One look at a running experiment.

    Attributes:
        num_blocks: Time blocks seen.
        share: Share of the planned blocks.
        relative: Interval of the relative effect that holds at all looks together.
        fixed: Interval that would hold if this were the only look.
    """

    num_blocks: int
    share: float
    relative: Interval
    fixed: Interval


def confidence_sequence(
    observations: Observations,
    statistic: Statistic,
    planned_blocks: int | None = None,
    alpha: float = 0.05,
) -> list[Look]:
    """Returns the effect after time blocks, with intervals valid at all looks together.

    There are at most forty looks, evenly spread; fewer looks only make the sequence safer.

    Args:
        observations: Both arms, with blocks in order of time.
        statistic: Which one.
        planned_blocks: Where the sequence is tightest; None for the last block.
        alpha: Share of runs in which the truth may leave the sequence at any time.
    """
    total = observations.num_blocks
    planned = planned_blocks or total
    step = max(1, -(-(total - FIRST_LOOK) // MAX_LOOKS))
    seen = sorted({*range(min(FIRST_LOOK, total), total, step), total})
    looks = [look_at(observations, statistic, blocks, planned, alpha) for blocks in seen]
    return [look for look in looks if look is not None]


def stopping_looks(
    observations: Observations, statistic: Statistic, planned_blocks: int, alpha: float
) -> list[Look]:
    """Returns the looks at every time block, up to the first that excludes zero.

    Args:
        observations: Both arms, with complete blocks in order of time.
        statistic: Which one.
        planned_blocks: Blocks of the run if it does not stop early.
        alpha: Share of runs in which the truth may leave the sequence at any time.
    """
    looks: list[Look] = []
    for seen in range(FIRST_LOOK, observations.num_blocks + 1):
        look = look_at(observations, statistic, seen, planned_blocks, alpha)
        if look is not None:
            looks.append(look)
            if look.relative.excludes_zero:
                break
    return looks


def look_at(
    observations: Observations,
    statistic: Statistic,
    num_blocks: int,
    planned_blocks: int,
    alpha: float,
) -> Look | None:
    """Returns the look after so many time blocks; None if an arm has no values yet.

    Args:
        observations: Both arms, with blocks in order of time.
        statistic: Which one.
        num_blocks: Time blocks to look at.
        planned_blocks: Where the sequence is tightest.
        alpha: Share of runs in which the truth may leave the sequence at any time.
    """
    mine = observations.blocks < num_blocks
    units = observations.units[mine] if observations.units is not None else None
    part = Observations(
        values=observations.values[mine],
        treated=observations.treated[mine],
        blocks=observations.blocks[mine],
        units=units,
    )
    if part.treated.all() or not part.treated.any() or num_blocks < 2:
        return None
    found = robust_estimate(part, statistic)
    fixed = float(stats.t.ppf(1 - alpha / 2, num_blocks - 1)) * found.log_error
    always = boundary(num_blocks, tuned_rho(planned_blocks, alpha), alpha) * found.log_error
    return Look(
        num_blocks=num_blocks,
        share=num_blocks / planned_blocks,
        relative=around(found.log_ratio, max(always, fixed)),
        fixed=around(found.log_ratio, fixed),
    )


def around(log_ratio: float, reach: float) -> Interval:
    """Returns the relative interval of a log ratio and its half-width."""
    end = math.log(UNBOUNDED)
    low, high = max(log_ratio - reach, -end), min(log_ratio + reach, end)
    return Interval(*(float(np.expm1(value)) for value in (log_ratio, low, high)))


def stopping_block(looks: Sequence[Look]) -> int | None:
    """Returns the first block at which the sequence excludes zero; None if it never does."""
    return next((look.num_blocks for look in looks if look.relative.excludes_zero), None)


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


def difference_time(values: Floats, treated: NDArray[np.bool_], order: Ints) -> float:
    """Returns the number of consecutive shots over which the arms' difference stays correlated.

    A wave of slow requests that hits both arms alike does not count. The difference of mean log
    values is taken in groups of eight shots; its correlation time, in shots, is at least eight.

    Args:
        values: [n] values above 0.
        treated: [n] whether the value is of the treatment arm.
        order: [n] number of the shot in time.
    """
    shots, places = np.unique(order, return_inverse=True)
    groups = places // GROUP_SHOTS
    size = len(shots) // GROUP_SHOTS + 1
    means = []
    for arm in (False, True):
        mine = treated == arm
        counts = np.bincount(groups[mine], minlength=size)
        sums = np.bincount(groups[mine], np.log(values[mine]), minlength=size)
        with np.errstate(invalid="ignore", divide="ignore"):
            means.append(sums / counts)
    difference = means[1] - means[0]
    return GROUP_SHOTS * autocorrelation_time(difference[np.isfinite(difference)])


def count_blocks(num_shots: int, correlation_time: float) -> int:
    """Returns the number of time blocks: as many as are long enough, from 30 to 200."""
    wanted = int(num_shots / (BLOCK_TIMES * correlation_time))
    return max(2, min(max(wanted, MIN_BLOCKS), MAX_BLOCKS, num_shots // 2))


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
    low, high = np.clip(invert(scores.at_factor, limit, ratio, 0.01), -end, end)
    low_ms, high_ms = np.clip(
        invert(scores.at_shift, limit, change, 0.01 * control), -end_ms, end_ms
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
    scores = BlockScores(observations, statistic).at_factor(0.0)
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
        scores.at_factor, lambda score: ROBUST_REACH * inflation * robust_error(score), ratio, 0.01
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

    def at_factor(self, log_factor: float) -> Floats:
        """[num_blocks] scores after the treatment's values are divided by a factor."""
        return self._scores(self.arms[1] * np.exp(-log_factor))

    def at_shift(self, shift: float) -> Floats:
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


@dataclass(frozen=True)
class Guardrail:
    """A quantity that the treatment must not make worse by more than a margin.

    Attributes:
        name: What is guarded.
        control: Value in the control arm; None where only one value exists (overlap).
        treatment: Value in the treatment arm.
        change: Interval of the change, oriented so that below zero is worse.
        margin: Largest loss that is accepted.
        outcome: "pass" if the whole interval is above -margin, "fail" if it is below, else
            "unclear".
    """

    name: str
    control: float | None
    treatment: float
    change: Interval
    margin: float
    outcome: Outcome

    @property
    def cause(self) -> Literal["errors", "quality"]:
        """What a failure means for users."""
        return "errors" if self.name == FAILED_REQUESTS else "quality"


def overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """Returns the share of items that two slates have in common, of the longer one; 1 if empty."""
    size = max(len(first), len(second))
    return len(set(first) & set(second)) / size if size else 1.0


def ndcg(slate: Sequence[str], next_item: str, k: int) -> float:
    """Returns NDCG@k with one relevant item: 1 / log2(rank + 1), 0 if it is not in the slate."""
    for place, item in enumerate(slate[:k]):
        if item == next_item:
            return 1 / math.log2(place + 2)
    return 0.0


def non_inferior(change: Interval, margin: float) -> Outcome:
    """Returns whether the change is surely above -margin, surely below, or neither."""
    if change.low >= -margin:
        return "pass"
    return "fail" if change.high < -margin else "unclear"


def guard_mean(
    name: str, observations: Observations, margin: float, worse: Literal["lower", "higher"]
) -> Guardrail:
    """Returns the guardrail on a mean, with a cluster-robust interval of 95 %.

    Clusters are the time blocks, or units if that gives the wider interval.

    Args:
        name: What is guarded.
        observations: Values of both arms; zero and negative values are fine.
        margin: Largest loss that is accepted.
        worse: Which direction is a loss.
    """
    scores = BlockScores(observations, "mean")
    control, treatment = scores.level(False), scores.level(True)
    sign = 1.0 if worse == "lower" else -1.0
    change = sign * (treatment - control)
    by_block = scores.at_shift(treatment - control)
    num_blocks = observations.num_blocks
    error = math.sqrt(float((by_block**2).sum()) * num_blocks / max(num_blocks - 1, 1))
    degrees = num_blocks - 1
    if observations.units is not None:
        error = max(error, unit_error(observations))
        degrees = min(degrees, len(np.unique(observations.units)) - 2)
    reach = float(stats.t.ppf(0.975, max(degrees, 1))) * error
    interval = Interval(change, change - reach, change + reach)
    return Guardrail(name, control, treatment, interval, margin, non_inferior(interval, margin))


def unit_error(observations: Observations) -> float:
    """Returns the standard error of a difference of means whose units stay in one arm.

    Source: Deng, Knoblich and Lu 2018, section 3.1 (the delta method for a ratio of sums).
    """
    assert observations.units is not None
    square = 0.0
    for arm in (False, True):
        mine = observations.treated == arm
        values = observations.values[mine]
        _, places = np.unique(observations.units[mine], return_inverse=True)
        sums = np.bincount(places, values - values.mean())
        square += len(sums) / max(len(sums) - 1, 1) * float((sums**2).sum()) / len(values) ** 2
    return math.sqrt(square)


def guard_share(
    name: str, bad: tuple[int, int], totals: tuple[int, int], margin: float
) -> Guardrail:
    """Returns the guardrail on the share of bad requests, with Newcombe's score interval of 95 %.

    It holds for shares at zero, where a bootstrap has no spread.

    Args:
        name: What is guarded.
        bad: Bad requests of control and treatment.
        totals: Requests of control and treatment, both above 0.
        margin: Largest rise of the share that is accepted.

    Source: Newcombe 1998, method 10.
    """
    shares = [b / n for b, n in zip(bad, totals, strict=True)]
    bounds = [
        stats.binomtest(b, n).proportion_ci(method="wilson")
        for b, n in zip(bad, totals, strict=True)
    ]
    change = shares[0] - shares[1]
    low = change - math.hypot(shares[0] - bounds[0].low, bounds[1].high - shares[1])
    high = change + math.hypot(bounds[0].high - shares[0], shares[1] - bounds[1].low)
    interval = Interval(change, low, high)
    return Guardrail(name, shares[0], shares[1], interval, margin, non_inferior(interval, margin))


def guard_overlap(overlaps: Sequence[float], margin: float) -> Guardrail:
    """Returns the guardrail on the mean overlap of two arms' slates for the same request.

    Args:
        overlaps: One value from 0 to 1 per request.
        margin: Largest loss of overlap that is accepted.
    """
    values = np.asarray(overlaps, dtype=np.float64)
    mean = float(values.mean())
    error = float(stats.sem(values)) if len(values) > 1 else 0.0
    reach = float(stats.t.ppf(0.975, max(len(values) - 1, 1))) * error
    if error == 0:
        # All values are equal: bound the share of other values by Wilson's interval.
        bound = float(stats.binomtest(0, len(values)).proportion_ci(method="wilson").high)
        change = Interval(mean - 1, max(-1.0, mean - 1 - bound), mean - 1)
    else:
        change = Interval(mean - 1, mean - 1 - reach, min(0.0, mean - 1 + reach))
    return Guardrail("overlap of slates", None, mean, change, margin, non_inferior(change, margin))
