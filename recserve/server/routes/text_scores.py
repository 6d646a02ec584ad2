"""Routes POST /v1/rerank, /v2/rerank and /generative_scoring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.scoring import GenerativeScoringRequest, RerankRequest
from recserve.server.app_state import AppState, json_response, wait_all
from recserve.server.threads import TEXT_MODELS, checked_first, on_thread
from recserve.server.transport.trace import trace_of
from recserve.service.pending import Pending

RERANK_BODY = msgspec.json.Decoder(RerankRequest)
SCORING_BODY = msgspec.json.Decoder(GenerativeScoringRequest)


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes that score given texts under a language model."""

    @app.post("/v1/rerank", operation_id="rerank")
    async def rerank(request: Request) -> Response:
        """Sort documents by relevance to a query, in Jina's format."""
        return await _rerank(app_state, request, "1")

    # vLLM's third name of the route, which litellm uses.
    app.add_api_route("/rerank", rerank, methods=["POST"], include_in_schema=False)

    @app.post("/v2/rerank", operation_id="rerank_v2")
    async def rerank_v2(request: Request) -> Response:
        """Sort documents by relevance to a query, in Cohere's format."""
        return await _rerank(app_state, request, "2")

    @app.post("/generative_scoring", operation_id="generative_scoring")
    async def generative_scoring(request: Request) -> Response:
        """Return probabilities of label tokens after a query and each item."""
        body = await app_state.body(request, SCORING_BODY)
        deadline_s = app_state.text_deadline_s(request, body.timeout_ms)
        name, scores = trace_of(request.scope).request_id, app_state.service.text.scores
        begin = scores.begin_scoring
        return await _answer(app_state, request, deadline_s, lambda: begin(body, name, deadline_s))


async def _rerank(app_state: AppState, request: Request, version: str) -> Response:
    body = await app_state.body(request, RERANK_BODY)
    deadline_s = app_state.text_deadline_s(request, body.timeout_ms)
    name, begin = trace_of(request.scope).request_id, app_state.service.text.scores.begin_rerank
    return await _answer(
        app_state, request, deadline_s, lambda: begin(body, version, name, deadline_s)
    )


async def _answer(
    app_state: AppState, request: Request, deadline_s: float, begin: Callable[[], Pending[Any]]
) -> Response:
    call = checked_first(app_state.service.engine, TEXT_MODELS, deadline_s, begin)
    work = await on_thread(app_state.threads.text, call)
    await wait_all(request, work.futures, deadline_s)
    return json_response(work.wait())
