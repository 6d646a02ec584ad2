"""Answers a recommend or rank request through the arms of its experiment."""

from __future__ import annotations

from typing import Generic

import msgspec
from starlette.requests import Request

from recserve.experiments.serving.experiment import ServingArm
from recserve.experiments.serving.registry import Draw
from recserve.server.arms.arm_run import ArmMisfit, measured
from recserve.server.arms.item_use import A, B, ItemUse
from recserve.server.exchange import Exchange, finished, outcomes
from recserve.server.transport.trace import trace_of


async def answer_items(exchange: Exchange, request: Request, use: ItemUse[B, A], body: B) -> A:
    """Returns the answer of a request.

    Args:
        exchange: State of the application.
        request: The HTTP request.
        use: The route.
        body: The decoded body.

    Raises:
        Exception: What the request fails with; row_of maps it to an HTTP error.
    """
    trace = trace_of(request.scope)
    deadline_s = exchange.deadline_s(request, body.timeout_ms)
    user = None if body.user is None else body.user.id
    draw = exchange.experiments.draw(use.name, user, trace.request_id, body)
    item_request = _ItemRequest(exchange, request, use, body, deadline_s)
    if draw is None:
        return finished(trace, await item_request.plain(body))
    trace.experiment = draw.label
    try:
        answer = await item_request.drawn(draw)
    except ArmMisfit as misfit:
        label = msgspec.structs.replace(
            draw.label, arm=None, reason=f"the arm does not fit: {misfit}"
        )
        trace.experiment = label
        answer = await item_request.plain(body)
    label = trace.experiment
    signer = exchange.service.runtime.signer
    token = signer.labelled(answer.attribution_token, label.name, label.arm or "")
    return finished(
        trace, msgspec.structs.replace(answer, experiment=label, attribution_token=token)
    )


class _ItemRequest(Generic[B, A]):
    """One request on its way through the arms."""

    def __init__(
        self,
        exchange: Exchange,
        request: Request,
        use: ItemUse[B, A],
        body: B,
        deadline_s: float,
    ) -> None:
        self.exchange = exchange
        self.request = request
        self.use = use
        self.body = body
        self.deadline_s = deadline_s

    async def plain(self, body: B) -> A:
        """Returns the answer of the service."""
        begin = self.use.begin(self.exchange.service)
        work = await self.exchange.begin(begin, self.request, body, self.deadline_s)
        (outcome,) = await outcomes(self.request, [work], self.deadline_s)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def drawn(self, draw: Draw) -> A:
        """Returns the answer of the arm."""
        if draw.arm is None:
            return await self.plain(self.body)
        if not draw.counted:
            return await self.plain(draw.arm.fields.applied(self.body))
        return await self._run(draw, draw.arm)

    async def _run(self, draw: Draw, arm: ServingArm) -> A:
        body = arm.fields.applied(self.body)
        return await measured(draw.experiment, arm, lambda: self.plain(body), self.use.empty)
