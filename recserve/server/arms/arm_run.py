"""Runs one request through one arm and records the result."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from recserve.experiments.serving.arm_tally import ArmResult
from recserve.experiments.serving.experiment import Experiment, ServingArm
from recserve.schemas.items import InvalidRequest
from recserve.server.errors import row_of

T = TypeVar("T")


class ArmMisfit(ValueError):
    """The fields of an arm do not fit a request. The client is not at fault."""


async def measured(
    experiment: Experiment,
    arm: ServingArm,
    run: Callable[[], Awaitable[T]],
    empty: Callable[[T], bool],
) -> T:
    """Runs a request and records its latency or its failure for the arm.

    Args:
        experiment: The experiment of the arm.
        arm: The arm.
        run: Runs the request.
        empty: Whether the answer is empty.

    Raises:
        ArmMisfit: If a field that the arm sets is invalid for this request.
        Exception: What the request failed with.
    """
    began_s = time.monotonic()
    try:
        answer = await run()
    except Exception as error:
        misfit = is_misfit(error, arm)
        if misfit or counts_as_failure(error):
            experiment.record(arm, ArmResult(seconds=None, failed=True))
        if misfit:
            raise ArmMisfit(str(error)) from error
        raise
    experiment.record(arm, ArmResult(time.monotonic() - began_s, empty=empty(answer)))
    return answer


def counts_as_failure(error: BaseException) -> bool:
    """Returns whether an arm may be at fault: status 5xx, or 429 of a full queue.

    A server that is loading or draining says nothing about its arms.
    """
    row = row_of(error)
    fault = row.status >= 500 or row.status == 429
    return fault and row.reason != "not_ready" and isinstance(error, Exception)


def is_misfit(error: BaseException, arm: ServingArm) -> bool:
    """Returns whether an error is about a field that the arm sets."""
    if not isinstance(error, InvalidRequest) or error.param is None:
        return False
    return error.param.split(".")[0].split("[")[0] in arm.fields.values
