"""Routes POST /v1/rank and /v1/rank:batch."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.items import RankBatchRequest, RankBatchResponse, RankOutcome, RankRequest
from recserve.server.app_state import AppState, gather, json_response
from recserve.server.errors import error_answer
from recserve.server.threads import is_large, on_thread
from recserve.server.transport.trace import trace_of

BODY = msgspec.json.Decoder(RankRequest)
BATCH_BODY = msgspec.json.Decoder(RankBatchRequest)


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes that rank candidates."""

    @app.post("/v1/rank", operation_id="rank")
    async def rank(request: Request) -> Response:
        """Return the given candidates, best first."""
        body = await app_state.body(request, BODY)
        service = app_state.service
        begin = service.ranker.begin
        answer = await app_state.answer_items(app_state, request, service, begin, body)
        return json_response(answer)

    @app.post("/v1/rank:batch", operation_id="rank_batch")
    async def rank_batch(request: Request) -> Response:
        """Return one ranking per request; an error in one does not affect the others."""
        body = await app_state.body(request, BATCH_BODY)
        begin = app_state.service.ranker.begin_batch
        deadline_s = app_state.deadline_s(request, body.timeout_ms)
        works = await app_state.begin(begin, request, body, deadline_s)
        pool = app_state.threads.items if is_large(body) else None
        found = await gather(request, works, deadline_s, pool)
        trace = trace_of(request.scope)
        for outcome in found:
            if not isinstance(outcome, Exception):
                trace.degraded.extend(outcome.degraded)

        def answer() -> Response:
            results = [
                RankOutcome(error=error_answer(outcome).error)
                if isinstance(outcome, Exception)
                else RankOutcome(answer=outcome)
                for outcome in found
            ]
            return json_response(RankBatchResponse(request_id=trace.request_id, results=results))

        return answer() if pool is None else await on_thread(pool, answer)
