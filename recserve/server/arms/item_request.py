"""One recommend or rank request, which can run on the services of several arms."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from starlette.requests import Request

from recserve.experiments.serving.arm_tally import ArmResult
from recserve.experiments.serving.experiment import Experiment, ServingArm
from recserve.schemas.items import InvalidRequest
from recserve.server.arms.item_use import A, B, ItemUse
from recserve.server.errors import row_of
from recserve.server.exchange import Exchange, outcomes
from recserve.service.pending import Pending


class ArmMisfit(ValueError):
    """The fields of an arm do not fit a request. The client is not at fault."""


@dataclass(frozen=True)
class ItemRequest(Generic[B, A]):
    """A request on its way through the arms.

    Attributes:
        exchange: State of the application.
        request: The HTTP request.
        use: The route.
        body: The decoded body, without the fields of an arm.
        deadline_s: time.monotonic() value of the deadline.
    """

    exchange: Exchange
    request: Request
    use: ItemUse[B, A]
    body: B
    deadline_s: float

    async def begin(self, arm: ServingArm | None, deadline_s: float) -> Pending[A]:
        """Starts the request on an arm; None is the plain service. Raises what it refuses with."""
        body = self.body if arm is None else arm.fields.applied(self.body)
        service = self.exchange.service
        return await self.exchange.begin(self.use.begin(service), self.request, body, deadline_s)

    async def answer(self, arm: ServingArm | None, deadline_s: float | None = None) -> A:
        """Returns the answer of an arm; None is the plain service."""
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        work = await self.begin(arm, deadline_s)
        (outcome,) = await outcomes(self.request, [work], deadline_s)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def fitted(self, arm: ServingArm) -> A:
        """Returns the answer of an arm. Raises ArmMisfit if its fields do not fit the request."""
        try:
            return await self.answer(arm)
        except InvalidRequest as error:
            if is_misfit(error, arm):
                raise ArmMisfit(str(error)) from error
            raise

    async def recorded(
        self, experiment: Experiment, arm: ServingArm, deadline_s: float | None = None
    ) -> A:
        """Returns the answer of an arm and records its latency or failure.

        Raises:
            ArmMisfit: If a field that the arm sets is invalid for this request.
            Exception: What the request fails with.
        """
        began_s = time.monotonic()
        try:
            answer = await self.answer(arm, deadline_s)
        except Exception as error:
            record_error(experiment, arm, error)
            if is_misfit(error, arm):
                raise ArmMisfit(str(error)) from error
            raise
        record_answer(experiment, arm, time.monotonic() - began_s, answer, self.use.empty)
        return answer


def record_answer(
    experiment: Experiment,
    arm: ServingArm,
    seconds: float,
    answer: A,
    empty: Callable[[A], bool],
) -> None:
    """Records an answer for its arm."""
    experiment.record(arm, ArmResult(seconds, empty=empty(answer)))


def record_error(experiment: Experiment, arm: ServingArm, error: BaseException) -> None:
    """Records an error for its arm, unless the client is at fault."""
    if counts_as_failure(error) or is_misfit(error, arm):
        experiment.record(arm, ArmResult(seconds=None, failed=True))


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
