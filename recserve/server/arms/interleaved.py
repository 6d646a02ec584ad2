"""Mode `interleaved`: one slate from the slates of both arms, each item marked with its arm."""

from __future__ import annotations

import time
from typing import cast

import msgspec

from recserve.experiments.serving.experiment import Experiment
from recserve.experiments.serving.team_draft import team_draft
from recserve.schemas.items import RecommendResponse
from recserve.server.arms.item_request import (
    ArmNotApplicable,
    ItemRequest,
    is_misfit,
    record_answer,
    record_error,
    record_refusal,
)
from recserve.server.arms.item_use import A, B
from recserve.service.pending import Pending, failed


async def interleaved(item_request: ItemRequest[B, A], experiment: Experiment) -> A:
    """Returns the interleaved slate, in the envelope of the control.

    If the treatment fails, the control's slate is returned alone.

    Args:
        item_request: A recommend request.
        experiment: An experiment with two arms.

    Raises:
        Exception: What the control fails with.
    """
    began_s = time.monotonic()
    ended_s: dict[str, float] = {}
    works: list[Pending[A]] = []
    for arm in experiment.arms:
        try:
            work = await item_request.begin_on(arm, item_request.arm_deadline_s(arm))
        except Exception as error:
            work = failed(error)

        def note(_: object, name: str = arm.name) -> None:
            ended_s[name] = time.monotonic()

        for future in work.futures:
            future.add_done_callback(note)
        works.append(work)
    found = await item_request.context.gather(works, item_request.deadline_s)
    for arm, outcome in zip(experiment.arms, found, strict=True):
        if isinstance(outcome, Exception):
            record_error(experiment, arm, outcome)
        else:
            seconds = ended_s.get(arm.name, time.monotonic()) - began_s
            record_answer(experiment, arm, seconds, outcome, item_request.use.empty)
    first, second = found
    if isinstance(first, Exception):
        if is_misfit(first, experiment.control):
            raise ArmNotApplicable(str(first)) from first
        raise first
    if isinstance(second, Exception):
        record_refusal(experiment, experiment.arms[1], second)
        return first
    experiment.compare(item_request.use.item_ids(first), item_request.use.item_ids(second))
    request_id = item_request.context.trace.request_id
    slates = cast(RecommendResponse, first), cast(RecommendResponse, second)
    return cast(A, _merged(slates, experiment, request_id))


def _merged(
    slates: tuple[RecommendResponse, RecommendResponse], experiment: Experiment, request_id: str
) -> RecommendResponse:
    control, treatment = slates
    k = max(len(control.items), len(treatment.items))
    picked = team_draft(
        control.items,
        treatment.items,
        lambda item: item.item_id,
        k,
        experiment.coin(request_id),
    )
    items = [
        msgspec.structs.replace(item, rank=rank, team=experiment.arms[team].name)
        for rank, (item, team) in enumerate(picked, start=1)
    ]
    degraded = list(dict.fromkeys([*control.degraded, *treatment.degraded]))
    return msgspec.structs.replace(control, items=items, degraded=degraded, exact=False)
