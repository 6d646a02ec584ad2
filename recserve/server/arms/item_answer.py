"""Answers a recommend or rank request through the arms of its experiment."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from recserve.core.errors import DeadlineExceeded
from recserve.experiments.serving.experiment import Experiment
from recserve.experiments.serving.registry import Draw
from recserve.server.arms.arm_server import ARM_HEADER, ArmServerError
from recserve.server.arms.interleaved import interleaved
from recserve.server.arms.item_request import ArmNotApplicable, ItemRequest, record_refusal
from recserve.server.arms.item_use import A, B, ItemUse
from recserve.server.arms.paired import paired
from recserve.server.arms.shadow_copies import with_shadow
from recserve.server.context import RequestContext
from recserve.service.pending import Pending


async def answer_items(
    context: RequestContext,
    use: ItemUse[B, A],
    begin: Callable[[B, str, float], Pending[A]],
    body: B,
) -> A:
    """Returns the answer of a request.

    Args:
        context: The request.
        use: The route.
        begin: Starts the request on the service.
        body: The decoded body.

    Raises:
        Exception: What the request fails with; row_of maps it to an HTTP error.
    """
    trace = context.trace
    deadline_s = context.deadline_s(body.timeout_ms)
    item_request = ItemRequest(context, use, begin, body, deadline_s)
    user = None if body.user is None else body.user.id
    draw = None
    if ARM_HEADER not in context.request.headers:
        draw = context.state.experiments.draw(use.name, user, trace.request_id, body)
    if draw is None:
        return context.record(await item_request.answer(None))
    label = trace.experiment = draw.label
    try:
        answer = await _drawn(item_request, draw)
    except ArmNotApplicable as misfit:
        reason = f"the arm does not fit: {misfit}"
        label = trace.experiment = msgspec.structs.replace(label, arm=None, reason=reason)
        answer = await item_request.answer(None)
    except ArmServerError as error:
        reason = f"the server of the arm failed: {error}"
        label = trace.experiment = msgspec.structs.replace(label, arm=None, reason=reason)
        answer = await _of_control(item_request, draw.experiment)
        assert draw.arm is not None
        record_refusal(draw.experiment, draw.arm, error)
    token = context.service.signer.labelled(answer.attribution_token, label.name, label.arm or "")
    labelled = msgspec.structs.replace(answer, experiment=label, attribution_token=token)
    return context.record(labelled)


async def _drawn(item_request: ItemRequest[B, A], draw: Draw) -> A:
    """Returns the answer of the arm, in the mode of the experiment."""
    if draw.arm is None:
        return await item_request.answer(None)
    if not draw.counted:
        return await item_request.fitted(draw.arm)
    mode = draw.experiment.settings.mode
    if mode == "paired":
        return await paired(item_request, draw.experiment)
    if mode == "shadow":
        return await with_shadow(item_request, draw.experiment)
    if mode == "interleaved":
        return await interleaved(item_request, draw.experiment)
    try:
        end_s = item_request.arm_deadline_s(draw.arm)
        return await item_request.recorded(draw.experiment, draw.arm, end_s)
    except DeadlineExceeded as error:
        if draw.arm.remote:
            raise ArmServerError("no answer in time") from error
        raise


async def _of_control(item_request: ItemRequest[B, A], experiment: Experiment) -> A:
    """Returns the control's answer, or that of the plain service if the control does not fit."""
    try:
        return await item_request.fitted(experiment.control)
    except ArmNotApplicable:
        return await item_request.answer(None)
