"""Always-valid inference on latencies, so that a run may stop early.

`boundary.py` explains confidence sequences. Time blocks are the observations: their log ratios are
close to independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from recserve.experiments.statistics.boundary import boundary, tuned_rho
from recserve.experiments.statistics.intervals import Interval, robust_estimate
from recserve.experiments.statistics.scores import UNBOUNDED, Observations, Statistic

# Looks before this block are not reported: the sequence is asymptotic.
FIRST_LOOK = 10
MAX_LOOKS = 40
# Time blocks of a run that may stop early. Their length is fixed before the run.
PLANNED_BLOCKS = 60


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
