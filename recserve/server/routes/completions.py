"""Routes POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import FastAPI
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.text import ChatRequest, CompletionRequest, TextRequest
from recserve.server.app_state import AppState, BeginTexts, json_response, wait_all
from recserve.server.event_stream import EventStream, PieceQueue
from recserve.server.piece_clock import StreamLatency
from recserve.server.threads import TEXT_MODELS, checked_first, on_thread
from recserve.server.transport.trace import trace_of
from recserve.service.text.stream import Piece

BODY = msgspec.json.Decoder(CompletionRequest)
CHAT_BODY = msgspec.json.Decoder(ChatRequest)
B = TypeVar("B", bound=TextRequest)


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes that generate text, in OpenAI's format."""

    @app.post("/v1/completions", operation_id="complete")
    async def complete(request: Request) -> Response:
        """Continue a prompt."""
        body = await app_state.body(request, BODY)
        begin = app_state.service.text.begin_completion
        return await app_state.write_texts(app_state, request, begin, body)

    @app.post("/v1/chat/completions", operation_id="chat")
    async def chat(request: Request) -> Response:
        """Generate the assistant's next turn."""
        body = await app_state.body(request, CHAT_BODY)
        begin = app_state.service.text.begin_chat
        return await app_state.write_texts(app_state, request, begin, body)


async def write_texts(
    app_state: AppState,
    request: Request,
    begin: BeginTexts[B],
    body: B,
    on_end: Callable[[BaseException | None, int], None] = lambda error, num_tokens: None,
) -> Response:
    """Returns the texts of a request, or the stream of their pieces.

    Args:
        app_state: State of the application.
        request: The HTTP request.
        begin: Starts the texts on the service.
        body: The decoded body.
        on_end: Called once, with the error that ended the texts or None, and the number of tokens.

    Raises:
        Exception: What the request fails with before its response starts.
    """
    deadline_s = app_state.text_deadline_s(request, body.timeout_ms)
    trace, pieces = trace_of(request.scope), PieceQueue()
    clock = StreamLatency(app_state.metrics, trace.began_s)

    def listen(piece: Piece) -> None:
        clock.take(piece)
        if body.stream:
            pieces.put(piece)

    try:
        # A thread applies the template and tokenises, because a long prompt takes a while.
        call = partial(begin, body, trace.request_id, deadline_s, listen)
        engine = app_state.service.engine
        engine.check_queue(TEXT_MODELS)
        checked = checked_first(engine, TEXT_MODELS, deadline_s, call)
        work = await on_thread(app_state.threads.text, checked)
    except Exception as error:
        on_end(error, 0)
        raise
    work.experiment = UNSET if trace.experiment is None else trace.experiment

    def end(error: BaseException | None) -> None:
        usage = work.usage()
        app_state.metrics.text_tokens(usage.prompt_tokens, usage.completion_tokens)
        app_state.metrics.count_drafts(work.plan.speculation.drafter, work.drafted())
        timing_ms = work.timing_ms()
        trace.record_answer(timing_ms)
        reasons = [stream.finish_reason for stream in work.streams]
        seconds = time.monotonic() - trace.began_s
        app_state.metrics.texts_ended(reasons, seconds, timing_ms.queue / 1e3)
        clock.close()
        on_end(error, usage.completion_tokens)

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
