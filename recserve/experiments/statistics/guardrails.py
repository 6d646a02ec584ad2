"""The guardrails that a run's answers allow: errors, short slates, overlap, NDCG."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recserve.experiments.load.datasets import Sample
from recserve.experiments.report.measurements import SampleColumns
from recserve.experiments.statistics.criteria import Criteria
from recserve.experiments.statistics.quality import (
    FAILED_REQUESTS,
    Guardrail,
    guard_mean,
    guard_overlap,
    guard_share,
    ndcg,
    overlap,
)
from recserve.experiments.statistics.scores import Observations


def find_guardrails(
    columns: SampleColumns,
    samples: Sequence[Sample],
    treatment: int,
    blocks: NDArray[np.int64],
    criteria: Criteria,
    overlaps: Sequence[float],
    by_unit: bool,
) -> list[Guardrail]:
    """Returns the guardrails that the answers allow.

    Args:
        columns: Requests of all arms.
        samples: What was asked.
        treatment: Number of the treatment arm.
        blocks: [n] time block of each request.
        criteria: Margins.
        overlaps: Overlap of the two arms' slates for the same requests; empty if unknown.
        by_unit: Whether a unit stays in one arm.
    """
    mine = (columns.arm == 0) | (columns.arm == treatment)
    arms = (0, treatment)
    totals = [int((columns.arm == arm).sum()) for arm in arms]
    failed = [int(columns.failed[columns.arm == arm].sum()) for arm in arms]
    found = [
        guard_share(
            FAILED_REQUESTS, (failed[0], failed[1]), (totals[0], totals[1]), criteria.error_margin
        )
    ]
    slates = np.array([one.reply is not None for one in columns.exchanges]) & mine
    items = [one.reply.item_ids if one.reply else () for one in columns.exchanges]
    if not any(items):
        return found
    if criteria.k:
        short = [
            sum(len(items[i]) < criteria.k for i in np.flatnonzero(slates & (columns.arm == arm)))
            for arm in arms
        ]
        answered = [int((slates & (columns.arm == arm)).sum()) for arm in arms]
        if min(answered):
            found.append(
                guard_share(
                    "short slates",
                    (short[0], short[1]),
                    (answered[0], answered[1]),
                    criteria.short_margin,
                )
            )
    if overlaps:
        found.append(guard_overlap(overlaps, criteria.overlap_margin))
    wanted = [samples[one.sample].next_item for one in columns.exchanges]
    judged = slates & np.array([item is not None for item in wanted])
    if judged.any() and len(np.unique(columns.arm[judged])) > 1:
        gains = np.array(
            [
                ndcg(items[i], wanted[i] or "", criteria.k or len(items[i]))
                for i in range(len(items))
            ]
        )
        units = columns.unit[judged] if by_unit else None
        treated = columns.arm[judged] == treatment
        observed = Observations(gains[judged], treated, blocks[judged], units)
        name = f"NDCG@{criteria.k}" if criteria.k else "NDCG"
        found.append(guard_mean(name, observed, criteria.ndcg_margin, "lower"))
    return found


def paired_overlaps(columns: SampleColumns, treatment: int) -> list[float]:
    """Returns the overlap of the slates of each pair in which both arms answered."""
    slates: dict[int, dict[int, tuple[str, ...]]] = {}
    for shot, one in zip(columns.shot, columns.exchanges, strict=True):
        if one.arm in (0, treatment) and one.reply is not None:
            slates.setdefault(int(shot), {})[one.arm] = one.reply.item_ids
    return [overlap(pair[0], pair[treatment]) for pair in slates.values() if len(pair) == 2]
