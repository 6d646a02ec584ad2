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
class Breach:
    """Why an arm is worse than the control.

    Attributes:
        cause: The guard that decided.
        text: The figures, for the log and the status.
    """

    cause: Cause
    text: str


# A breach, or why there is none. Both need one-sided confidence 99 % and `min_requests`.
Check = Breach | Literal["holds", "unclear"]


def judge(control: WindowSummary, arm: WindowSummary, guard: GuardSettings) -> Breach | None:
    """Returns why the arm must stop; None if it may go on."""
    checks = (check_errors, check_empty, check_p99)
    found = (check(control, arm, guard) for check in checks)
    return next((one for one in found if isinstance(one, Breach)), None)


def check_errors(control: WindowSummary, arm: WindowSummary, guard: GuardSettings) -> Check:
    """Returns a breach if the arm surely has more errors than allowed, by the Wilson bound."""
    counts = arm.errors, arm.requests, control.errors, control.requests
    return _check_share("errors", "error share", counts, guard.error_share, guard)


def check_empty(control: WindowSummary, arm: WindowSummary, guard: GuardSettings) -> Check:
    """Returns a breach if the arm surely has more empty answers than allowed."""
    counts = arm.empty, arm.requests, control.empty, control.requests
    return _check_share("empty", "share of empty answers", counts, guard.empty_share, guard)


def check_p99(control: WindowSummary, arm: WindowSummary, guard: GuardSettings) -> Check:
    """Returns a breach if the arm's p99 is surely higher than allowed, by order statistics."""
    if min(len(control.seconds), len(arm.seconds)) < guard.min_requests:
        return "unclear"
    ours = percentile(arm.seconds, P99, 2 * CONFIDENCE - 1)
    base = percentile(control.seconds, P99, CONFIDENCE)
    if ours is None or base is None or ours.low is None:
        return "unclear"
    if ours.low <= guard.p99_factor * base.value:
        return "holds"
    return Breach(
        "p99",
        f"p99 {ours.value * 1e3:.1f} ms in {len(arm.seconds)} answers; "
        f"control {base.value * 1e3:.1f} ms",
    )


def _check_share(
    cause: Cause, name: str, counts: tuple[int, int, int, int], floor: float, guard: GuardSettings
) -> Check:
    mine, requests, theirs, control_requests = counts
    if min(requests, control_requests) < guard.min_requests:
        return "unclear"
    share, base = mine / requests, theirs / control_requests
    if wilson_low(mine, requests) <= max(floor, guard.factor * base):
        return "holds"
    return Breach(cause, f"{name} {share:.4f} in {requests} requests; control {base:.4f}")


def wilson_low(count: int, total: int) -> float:
    """Returns the lower end of Wilson's one-sided interval of a share."""
    if not count:
        return 0.0
    z = NormalDist().inv_cdf(CONFIDENCE)
    share = count / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (middle - spread) / (1 + z * z / total)
