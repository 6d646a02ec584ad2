"""Answers a recommend or rank request through the arms of its experiment."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request

from recserve.core.errors import DeadlineExceeded
from recserve.experiments.serving.experiment import Experiment
from recserve.experiments.serving.registry import Draw
from recserve.server.app_state import AppState, trace_answer
from recserve.server.arms.arm_server import ARM_HEADER, ArmServerError
from recserve.server.arms.interleaved import interleaved
from recserve.server.arms.item_request import ArmNotApplicable, ItemRequest, record_refusal
from recserve.server.arms.item_use import A, B, ItemUse
from recserve.server.arms.paired import paired
from recserve.server.arms.shadow_copies import with_shadow
from recserve.server.transport.trace import trace_of
from recserve.service import Service
from recserve.service.pending import Pending


async def answer_items(
    app_state: AppState,
    request: Request,
    use: ItemUse[B, A],
    service: Service,
    begin: Callable[[B, str, float], Pending[A]],
    body: B,
) -> A:
    """Returns the answer of a request.

    Args:
        app_state: State of the application.
        request: The HTTP request.
        use: The route.
        service: The service that answers, also if it is replaced meanwhile.
        begin: Starts the request on it.
        body: The decoded body.

    Raises:
        Exception: What the request fails with; row_of maps it to an HTTP error.
    """
    trace = trace_of(request.scope)
    deadline_s = app_state.deadline_s(request, body.timeout_ms)
    item_request = ItemRequest(app_state, request, use, service, begin, body, deadline_s)
    user = None if body.user is None else body.user.id
    draw = None
    if ARM_HEADER not in request.headers:
        draw = app_state.experiments.draw(use.name, user, trace.request_id, body)
    if draw is None:
        return trace_answer(trace, await item_request.answer(None))
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
    draw.experiment.count_answer(label, trace.request_id if user is None else user)
    # An answer that does not count for its arm has no arm in its token, so its clicks do not count.
    arm_name = (label.arm or "") if label.reason is None else ""
    token = service.signer.labelled(answer.attribution_token, label.name, arm_name)
    labelled = msgspec.structs.replace(answer, experiment=label, attribution_token=token)
    return trace_answer(trace, labelled)


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
