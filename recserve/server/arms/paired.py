"""Mode `paired`: a request runs through both arms, one after the other, in drawn order."""

from __future__ import annotations

import time

from recserve.core.errors import DeadlineExceeded
from recserve.experiments.serving.experiment import Experiment
from recserve.server.arms.arm_server import ArmRefusal
from recserve.server.arms.item_request import (
    ItemRequest,
    record_answer,
    record_error,
    record_refusal,
)
from recserve.server.arms.item_use import A, B
from recserve.server.errors import ClientGone


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
    trace = item_request.context.trace
    began_s, end_s = time.monotonic(), item_request.deadline_s
    half_s = began_s + (end_s - began_s) / 2
    if experiment.coin(trace.request_id).random() < 0.5:
        answer = await item_request.recorded(experiment, experiment.control)
        other = await _treatment(item_request, experiment, end_s, time.monotonic() < half_s)
    else:
        other = await _treatment(item_request, experiment, half_s, False)
        answer = await item_request.recorded(experiment, experiment.control)
    if isinstance(other, ArmRefusal):
        record_refusal(experiment, experiment.arms[1], other)
    elif other is not None:
        experiment.compare(item_request.use.item_ids(answer), item_request.use.item_ids(other))
    return answer


async def _treatment(
    item_request: ItemRequest[B, A], experiment: Experiment, deadline_s: float, had_time: bool
) -> A | ArmRefusal | None:
    """Returns the answer of the second arm, or its refusal; None if it failed.

    Args:
        item_request: The request.
        experiment: An experiment with two arms.
        deadline_s: time.monotonic() value of the arm's own deadline.
        had_time: False if a missed deadline may be due to the pairing; it is then no error.

    Raises:
        ClientGone: If the client closes the connection.
    """
    arm = experiment.arms[1]
    began_s = time.monotonic()
    try:
        answer = await item_request.answer(arm, deadline_s)
    except ClientGone:
        raise
    except ArmRefusal as refusal:
        return refusal
    except Exception as error:
        if isinstance(error, DeadlineExceeded) and not had_time:
            experiment.drop()
        else:
            record_error(experiment, arm, error)
        return None
    record_answer(experiment, arm, time.monotonic() - began_s, answer, item_request.use.empty)
    return answer
