"""Handlers of POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from msgspec import UNSET
from starlette.responses import Response

from recserve.schemas.api import Api
from recserve.schemas.text import ChatRequest, CompletionRequest, TextRequest
from recserve.server.context import BeginTexts, RequestContext
from recserve.server.event_stream import EventStream, PieceQueue
from recserve.server.piece_clock import StreamLatency
from recserve.server.routing import handles, json_response
from recserve.service.errors import Uncompiled
from recserve.service.text.pending_texts import PendingTexts
from recserve.service.text.stream import Piece

B = TypeVar("B", bound=TextRequest)


@handles(Api.complete)
async def complete(context: RequestContext, body: CompletionRequest) -> Response:
    """Answers with continuations, whole or as a stream."""
    return await _answer(context, context.service.text.begin_completion, body)


@handles(Api.chat)
async def chat(context: RequestContext, body: ChatRequest) -> Response:
    """Answers with the assistant's next turn, whole or as a stream."""
    return await _answer(context, context.service.text.begin_chat, body)


async def _answer(context: RequestContext, begin: BeginTexts[B], body: B) -> Response:
    """Writes texts by the arm that is drawn for a request, if there are experiments."""
    arms = context.state.arms
    if arms is None or context.untracked:
        return await write_texts(context, begin, body)
    return await arms.write_texts(context, begin, body)


async def _prepare(
    context: RequestContext, begin: Callable[[], PendingTexts], deadline_s: float
) -> PendingTexts:
    """Begins texts. A new constraint is compiled on a thread that no other request waits for."""
    threads = context.state.threads
    while True:
        try:
            return await context.prepare(begin, deadline_s, threads.text)
        except Uncompiled as needed:
            await context.prepare(needed.compile, deadline_s, threads.grammars, needed.size)


async def write_texts(
    context: RequestContext,
    begin: BeginTexts[B],
    body: B,
    on_end: Callable[[BaseException | None, int], None] = lambda error, num_tokens: None,
) -> Response:
    """Returns the texts of a request, or the stream of their pieces.

    Args:
        context: The request.
        begin: Starts the texts on the service.
        body: The decoded body.
        on_end: Called once, with the error that ended the texts or None, and the number of tokens.

    Raises:
        Exception: What the request fails with before its response starts.
    """
    deadline_s = context.deadline_s(body.timeout_ms)
    metrics, trace, pieces = context.state.metrics, context.trace, PieceQueue()
    clock = StreamLatency(metrics, trace.began_s)

    def listen(piece: Piece) -> None:
        clock.take(piece)
        if body.stream:
            pieces.put(piece)

    try:
        call = partial(begin, body, trace.request_id, deadline_s, listen, context.client, True)
        work = await _prepare(context, call, deadline_s)
    except Exception as error:
        on_end(error, 0)
        raise
    work.experiment = UNSET if trace.experiment is None else trace.experiment

    def end(error: BaseException | None) -> None:
        usage = work.usage()
        metrics.text_tokens(usage.prompt_tokens, usage.completion_tokens)
        metrics.count_drafts(work.plan.speculation.drafter, work.sum_drafts())
        timing_ms = work.timing_ms()
        trace.record_answer(timing_ms)
        reasons = [stream.finish_reason for stream in work.streams]
        seconds = time.monotonic() - trace.began_s
        metrics.texts_ended(reasons, seconds, timing_ms.queue / 1e3)
        clock.close()
        if metrics.vllm_texts is not None and error is None:
            work.describe(metrics.vllm_texts.observe)
        on_end(error, usage.completion_tokens)

    if body.stream:
        stream = EventStream(context, work, pieces, deadline_s, end)
        return await stream.wait_for_first()
    try:
        await context.wait(work.futures, deadline_s)
        answer = work.wait()
    except BaseException as error:
        end(error)
        raise
    end(None)
    return json_response(answer)
