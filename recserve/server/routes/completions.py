"""Routes POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.text import ChatRequest, CompletionRequest, TextRequest
from recserve.server.event_stream import EventStream, Pieces
from recserve.server.exchange import Exchange, ended, json_response
from recserve.server.piece_clock import PieceClock
from recserve.server.transport.trace import trace_of
from recserve.service.text.completions import PendingTexts
from recserve.service.text.stream import Listener, Piece

BODY = msgspec.json.Decoder(CompletionRequest)
CHAT_BODY = msgspec.json.Decoder(ChatRequest)
B = TypeVar("B", bound=TextRequest)
Begin = Callable[[B, str, float, Listener], PendingTexts]


def add_routes(app: FastAPI, exchange: Exchange) -> None:
    """Adds the routes that generate text, in OpenAI's format."""

    @app.post("/v1/completions", operation_id="complete")
    async def complete(request: Request) -> Response:
        """Continue a prompt."""
        body = await exchange.body(request, BODY)
        return await _answer(exchange, request, body, exchange.service.texts.begin_completion)

    @app.post("/v1/chat/completions", operation_id="chat")
    async def chat(request: Request) -> Response:
        """Generate the assistant's next turn."""
        body = await exchange.body(request, CHAT_BODY)
        return await _answer(exchange, request, body, exchange.service.texts.begin_chat)


async def _answer(exchange: Exchange, request: Request, body: B, begin: Begin[B]) -> Response:
    deadline_s = exchange.text_deadline_s(request, body.timeout_ms)
    trace, pieces = trace_of(request.scope), Pieces()

    clock = PieceClock(exchange.metrics, trace.began_s)

    def listen(piece: Piece) -> None:
        clock.take(piece)
        if body.stream:
            pieces.put(piece)

    # Tokenising a long prompt takes a while, so it runs off the event loop.
    work = await asyncio.to_thread(begin, body, trace.request_id, deadline_s, listen)

    def count() -> None:
        usage = work.usage()
        exchange.metrics.text_tokens(usage.prompt_tokens, usage.completion_tokens)
        exchange.metrics.drafted(work.speculation.drafter, work.drafted())
        timing_ms = work.timing_ms()
        trace.answered(timing_ms)
        reasons = [stream.finish_reason for stream in work.streams]
        seconds = time.monotonic() - trace.began_s
        exchange.metrics.texts_ended(reasons, seconds, timing_ms.queue / 1e3)
        clock.close()

    if body.stream:
        return await EventStream(request, work, pieces, deadline_s, count).begin()
    try:
        await ended(request, work.futures, deadline_s)
        return json_response(work.answer())
    finally:
        count()
