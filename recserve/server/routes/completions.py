"""Routes POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.text import ChatRequest, CompletionRequest, TextRequest
from recserve.server.app_state import AppState, json_response, wait_all
from recserve.server.arms.text_answer import TextArm
from recserve.server.event_stream import EventStream, PieceQueue
from recserve.server.piece_clock import StreamLatency
from recserve.server.threads import TEXT_MODELS, checked_first, on_thread
from recserve.server.transport.trace import trace_of
from recserve.service.text.pending_texts import PendingTexts
from recserve.service.text.stream import Listener, Piece

BODY = msgspec.json.Decoder(CompletionRequest)
CHAT_BODY = msgspec.json.Decoder(ChatRequest)
B = TypeVar("B", bound=TextRequest)
Begin = Callable[[B, str, float, Listener], PendingTexts]


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes that generate text, in OpenAI's format."""

    @app.post("/v1/completions", operation_id="complete")
    async def complete(request: Request) -> Response:
        """Continue a prompt."""
        body = await app_state.body(request, BODY)
        return await _answer(app_state, request, body, app_state.service.text.begin_completion)

    @app.post("/v1/chat/completions", operation_id="chat")
    async def chat(request: Request) -> Response:
        """Generate the assistant's next turn."""
        body = await app_state.body(request, CHAT_BODY)
        return await _answer(app_state, request, body, app_state.service.text.begin_chat)


async def _answer(app_state: AppState, request: Request, body: B, begin: Begin[B]) -> Response:
    deadline_s = app_state.text_deadline_s(request, body.timeout_ms)
    trace, pieces = trace_of(request.scope), PieceQueue()
    arm = TextArm.of(app_state, trace, body)

    clock = StreamLatency(app_state.metrics, trace.began_s)

    def listen(piece: Piece) -> None:
        clock.take(piece)
        if body.stream:
            pieces.put(piece)

    async def prepared(body: B) -> PendingTexts:
        """Applies the template and tokenises on a thread, because a long prompt takes a while."""
        call = partial(begin, body, trace.request_id, deadline_s, listen)
        engine = app_state.service.engine
        engine.check_queue(TEXT_MODELS)
        checked = checked_first(engine, TEXT_MODELS, deadline_s, call)
        return await on_thread(app_state.threads.text, checked)

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
        app_state.metrics.text_tokens(usage.prompt_tokens, usage.completion_tokens)
        app_state.metrics.count_drafts(work.plan.speculation.drafter, work.drafted())
        timing_ms = work.timing_ms()
        trace.record_answer(timing_ms)
        reasons = [stream.finish_reason for stream in work.streams]
        seconds = time.monotonic() - trace.began_s
        app_state.metrics.texts_ended(reasons, seconds, timing_ms.queue / 1e3)
        clock.close()

    def end(error: BaseException | None) -> None:
        count()
        if error is None:
            arm.record_answer(work.usage().completion_tokens)
        else:
            arm.record_failure(error)

    if body.stream:
        return await EventStream(request, work, pieces, deadline_s, end).begin()
    try:
        await wait_all(request, work.futures, deadline_s)
        answer = work.wait()
    except BaseException as error:
        end(error)
        raise
    end(None)
    return json_response(answer)
