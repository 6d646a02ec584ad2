"""Mode `paired`: a request runs through both arms, one after the other, in drawn order."""

from __future__ import annotations

import contextlib
import time

from recserve.experiments.serving.experiment import Experiment
from recserve.server.arms.item_request import ItemRequest
from recserve.server.arms.item_use import A, B
from recserve.server.errors import ClientGone
from recserve.server.transport.trace import trace_of


async def paired(item_request: ItemRequest[B, A], experiment: Experiment) -> A:
    """Returns the control's answer and records the latencies of both arms.

    A treatment that goes first gets half of the time that is left, so that the control still
    answers. An error of the treatment never reaches the client.

    Args:
        item_request: The request.
        experiment: An experiment with two arms.

    Raises:
        Exception: What the control fails with.
    """
    control, treatment = experiment.arms
    trace = trace_of(item_request.request.scope)
    if experiment.coin(trace.request_id).random() < 0.5:
        answer = await item_request.recorded(experiment, control)
        with contextlib.suppress(Exception):
            other = await item_request.recorded(experiment, treatment)
            experiment.compare(item_request.use.item_ids(answer), item_request.use.item_ids(other))
        return answer
    now_s = time.monotonic()
    half_s = now_s + (item_request.deadline_s - now_s) / 2
    other_ids: list[str] | None = None
    try:
        other = await item_request.recorded(experiment, treatment, half_s)
        other_ids = item_request.use.item_ids(other)
    except ClientGone:
        raise
    except Exception:  # the treatment's own failure, which is recorded
        other_ids = None
    answer = await item_request.recorded(experiment, control)
    if other_ids is not None:
        experiment.compare(item_request.use.item_ids(answer), other_ids)
    return answer
