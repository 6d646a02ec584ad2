"""Mode `shadow`: a copy of the request runs through the treatment; its answer is discarded."""

from __future__ import annotations

import asyncio
import time

from recserve.experiments.serving.experiment import Experiment
from recserve.server.arms.item_request import (
    ItemRequest,
    record_answer,
    record_error,
    record_refusal,
)
from recserve.server.arms.item_use import A, B

MAX_COPIES = 8


async def with_shadow(item_request: ItemRequest[B, A], experiment: Experiment) -> A:
    """Returns the control's answer and starts a copy in the background.

    The copy is dropped while requests wait for the engine, and while MAX_COPIES copies run.

    Args:
        item_request: The request.
        experiment: An experiment with two arms.

    Raises:
        Exception: What the control fails with.
    """
    answer = await item_request.recorded(experiment, experiment.control)
    copies = item_request.context.state.copies
    waiting = item_request.context.service.engine.stats().queue_depth
    if waiting or len(copies) >= MAX_COPIES:
        experiment.drop()
        return answer
    given = item_request.use.item_ids(answer)
    task = asyncio.create_task(_copy(item_request, experiment, given))
    copies.add(task)
    task.add_done_callback(copies.discard)
    return answer


async def _copy(item_request: ItemRequest[B, A], experiment: Experiment, given: list[str]) -> None:
    """Runs the treatment and compares its items with the given ones. It never raises an error."""
    arm = experiment.arms[1]
    began_s = time.monotonic()
    deadline_s = began_s + item_request.context.state.default_timeout_ms / 1e3
    try:
        if item_request.context.state.lifecycle.service is not item_request.context.service:
            return  # a replaced service keeps nothing of users in its caches
        work = await item_request.begin_on(arm, deadline_s)
        await asyncio.gather(*map(asyncio.wrap_future, work.futures))
        answer = work.wait()
    except Exception as error:
        record_error(experiment, arm, error)
        record_refusal(experiment, arm, error)
        return
    record_answer(experiment, arm, time.monotonic() - began_s, answer, item_request.use.empty)
    experiment.compare(given, item_request.use.item_ids(answer))
