"""Quality of slates and the guardrails that an experiment must not cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from recserve.experiments.statistics.intervals import Interval
from recserve.experiments.statistics.scores import BlockScores, Observations

FAILED_REQUESTS = "failed requests"
Outcome = Literal["pass", "fail", "unclear"]


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
    by_block = scores.shifted(treatment - control)
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
