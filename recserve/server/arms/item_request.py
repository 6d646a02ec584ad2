"""One recommend or rank request, which can run on the services of several arms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import msgspec

from recserve.experiments.serving.arm_tally import ArmResult
from recserve.experiments.serving.experiment import Experiment, ServingArm
from recserve.schemas.items import InvalidRequest
from recserve.server.arms.arm_server import ArmRefusal, RemoteArm
from recserve.server.arms.item_use import A, B, ItemUse
from recserve.server.context import RequestContext
from recserve.server.errors import row_of
from recserve.server.threads import is_large
from recserve.service.pending import Pending


class ArmNotApplicable(ValueError):
    """The fields of an arm do not fit a request. The client is not at fault."""


@dataclass(frozen=True)
class ItemRequest(Generic[B, A]):
    """A request on its way through the arms.

    Attributes:
        context: The HTTP request.
        use: The route.
        begin: Starts the request on the service.
        body: The decoded body, without the fields of an arm.
        deadline_s: time.monotonic() value of the deadline.
    """

    context: RequestContext
    use: ItemUse[B, A]
    begin: Callable[[B, str, float], Pending[A]]
    body: B
    deadline_s: float

    async def begin_on(self, arm: ServingArm | None, deadline_s: float) -> Pending[A]:
        """Starts the request on an arm; None is the plain service. Raises what it refuses with."""
        body = self.body if arm is None else arm.fields.applied(self.body)
        server = None if arm is None else self.context.state.arm_servers.get(arm.label)
        if server is not None:
            return self._forwarded(server, body, deadline_s)
        return await self.context.begin(self.begin, body, deadline_s)

    def arm_deadline_s(self, arm: ServingArm) -> float:
        """Returns the deadline of an arm. Another server gets half of the time that is left."""
        if not arm.remote:
            return self.deadline_s
        now_s = time.monotonic()
        return now_s + (self.deadline_s - now_s) / 2

    def _forwarded(self, server: RemoteArm, body: B, deadline_s: float) -> Pending[A]:
        """Starts the request on another server. Its answer gets a token of this server."""
        request_id = self.context.trace.request_id
        sent = msgspec.structs.replace(body, request_id=request_id)
        # A future of this kind cancels the task with it, as the engine's futures do.
        future = asyncio.run_coroutine_threadsafe(
            server.send(self.use.path, sent, self.use.answer, deadline_s),
            asyncio.get_running_loop(),
        )

        def finish(results: list[A]) -> A:
            (answer,) = results
            user = None if body.user is None else body.user.id
            versions = answer.model_version, answer.catalog_version
            token = self.context.service.signer.token(request_id, user, *versions)
            return msgspec.structs.replace(answer, attribution_token=token)

        return Pending((future,), finish)

    async def answer(self, arm: ServingArm | None, deadline_s: float | None = None) -> A:
        """Returns the answer of an arm; None is the plain service."""
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        work = await self.begin_on(arm, deadline_s)
        # The connection to another server has a timer of its own, which says what was late.
        remote = arm is not None and arm.remote
        until_s = self.deadline_s if remote else deadline_s
        pool = self.context.state.threads.items if is_large(self.body) else None
        (outcome,) = await self.context.gather([work], until_s, pool)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def fitted(self, arm: ServingArm) -> A:
        """Returns an arm's answer. Raises ArmNotApplicable if its fields do not fit."""
        try:
            return await self.answer(arm)
        except InvalidRequest as error:
            if is_misfit(error, arm):
                raise ArmNotApplicable(str(error)) from error
            raise

    async def recorded(
        self, experiment: Experiment, arm: ServingArm, deadline_s: float | None = None
    ) -> A:
        """Returns the answer of an arm and records its latency or failure.

        Raises:
            ArmNotApplicable: If a field that the arm sets is invalid for this request.
            Exception: What the request fails with.
        """
        began_s = time.monotonic()
        try:
            answer = await self.answer(arm, deadline_s)
        except Exception as error:
            record_error(experiment, arm, error)
            if is_misfit(error, arm):
                raise ArmNotApplicable(str(error)) from error
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
    """Records an error for its arm, unless the client is at fault.

    The client may be at fault for an ArmRefusal; `record_refusal` records it.
    """
    if isinstance(error, ArmRefusal):
        return
    if counts_as_failure(error) or is_misfit(error, arm):
        experiment.record(arm, ArmResult(seconds=None, failed=True))


def record_refusal(experiment: Experiment, arm: ServingArm, error: BaseException) -> None:
    """Records an ArmRefusal as an error of the arm. The control has answered the request."""
    if isinstance(error, ArmRefusal):
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
