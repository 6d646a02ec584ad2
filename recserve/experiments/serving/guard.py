"""Guards of an experiment: they compare an arm with the control over the sliding window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from recserve.experiments.serving.arm_tally import WindowSummary, percentile
from recserve.experiments.serving.settings import GuardSettings

Cause = Literal["errors", "empty", "p99"]
CAUSES: tuple[Cause, ...] = ("errors", "empty", "p99")
# An arm must be worse with this confidence, so that one bad request stops nothing.
CONFIDENCE = 0.99
P99 = 0.99


@dataclass(frozen=True)
class Verdict:
    """Why an arm is worse than the control.

    Attributes:
        cause: The guard that decided.
        text: The figures, for the log and the status.
    """

    cause: Cause
    text: str


def judge(control: WindowSummary, arm: WindowSummary, guard: GuardSettings) -> Verdict | None:
    """Returns why the arm must stop; None if it may go on.

    An arm stops if the lower end of its interval lies above the allowed value: for shares the
    Wilson bound, for p99 the order statistic, both with one-sided confidence 99 %.

    Args:
        control: Requests of the control in the window.
        arm: Requests of the arm in the window.
        guard: Bounds and the least number of requests.
    """
    if min(control.requests, arm.requests) < guard.min_requests:
        return None
    causes: tuple[tuple[Cause, str, int, int, float], ...] = (
        ("errors", "error share", arm.errors, control.errors, guard.error_share),
        ("empty", "share of empty answers", arm.empty, control.empty, guard.empty_share),
    )
    for cause, name, mine, theirs, floor in causes:
        share, base = mine / arm.requests, theirs / control.requests
        if wilson_low(mine, arm.requests) > max(floor, guard.factor * base):
            return Verdict(
                cause, f"{name} {share:.4f} in {arm.requests} requests; control {base:.4f}"
            )
    if min(len(control.seconds), len(arm.seconds)) < guard.min_requests:
        return None
    ours = percentile(arm.seconds, P99, 2 * CONFIDENCE - 1)
    base_p99 = percentile(control.seconds, P99, CONFIDENCE)
    if ours is None or base_p99 is None or ours.low is None:
        return None
    if ours.low > guard.p99_factor * base_p99.value:
        return Verdict(
            "p99",
            f"p99 {ours.value * 1e3:.1f} ms in {len(arm.seconds)} answers; "
            f"control {base_p99.value * 1e3:.1f} ms",
        )
    return None


def wilson_low(count: int, total: int) -> float:
    """Returns the lower end of Wilson's one-sided interval of a share."""
    if not count:
        return 0.0
    z = NormalDist().inv_cdf(CONFIDENCE)
    share = count / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (middle - spread) / (1 + z * z / total)
