"""Handlers of POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.responses import Response

from recserve.schemas.api import Api
from recserve.schemas.text import ChatRequest, CompletionRequest, TextRequest
from recserve.server.arms.text_answer import TextArm
from recserve.server.context import RequestContext
from recserve.server.event_stream import EventStream, PieceQueue
from recserve.server.piece_clock import StreamLatency
from recserve.server.routing import handles, json_response
from recserve.service.text.pending_texts import PendingTexts
from recserve.service.text.stream import Listener, Piece

B = TypeVar("B", bound=TextRequest)
Begin = Callable[[B, str, float, Listener], PendingTexts]


@handles(Api.complete)
async def complete(context: RequestContext, body: CompletionRequest) -> Response:
    """Answers with continuations, whole or as a stream."""
    return await _answer(context, body, context.service.text.begin_completion)


@handles(Api.chat)
async def chat(context: RequestContext, body: ChatRequest) -> Response:
    """Answers with the assistant's next turn, whole or as a stream."""
    return await _answer(context, body, context.service.text.begin_chat)


async def _answer(context: RequestContext, body: B, begin: Begin[B]) -> Response:
    deadline_s = context.deadline_s(body.timeout_ms)
    metrics, trace, pieces = context.state.metrics, context.trace, PieceQueue()
    arm = TextArm.of(context, body)

    clock = StreamLatency(metrics, trace.began_s)

    def listen(piece: Piece) -> None:
        clock.take(piece)
        if body.stream:
            pieces.put(piece)

    async def prepared(body: B) -> PendingTexts:
        call = partial(begin, body, trace.request_id, deadline_s, listen)
        return await context.begin_text(call, deadline_s)

    try:
        work = await prepared(arm.body)
    except Exception as error:
        plain = arm.without_misfit(error, trace, body)
        if plain is None:
            arm.record_failure(error)
            raise
        arm = plain
        work = await prepared(arm.body)
    work.experiment = arm.label

    def count() -> None:
        usage = work.usage()
        metrics.text_tokens(usage.prompt_tokens, usage.completion_tokens)
        metrics.count_drafts(work.plan.speculation.drafter, work.drafted())
        timing_ms = work.timing_ms()
        trace.record_answer(timing_ms)
        reasons = [stream.finish_reason for stream in work.streams]
        seconds = time.monotonic() - trace.began_s
        metrics.texts_ended(reasons, seconds, timing_ms.queue / 1e3)
        clock.close()

    def end(error: BaseException | None) -> None:
        count()
        if error is None:
            arm.record_answer(work.usage().completion_tokens)
        else:
            arm.record_failure(error)

    if body.stream:
        return await EventStream(context, work, pieces, deadline_s, end).begin()
    try:
        await context.wait(work.futures, deadline_s)
        answer = work.wait()
    except BaseException as error:
        end(error)
        raise
    end(None)
    return json_response(answer)
