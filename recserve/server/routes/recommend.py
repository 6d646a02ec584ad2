"""Route POST /v1/recommend."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.items import RecommendRequest
from recserve.server.exchange import Exchange, finished, json_response, outcomes
from recserve.server.transport.trace import trace_of

BODY = msgspec.json.Decoder(RecommendRequest)


def add_routes(app: FastAPI, exchange: Exchange) -> None:
    """Adds the route of the recommender."""

    @app.post("/v1/recommend", operation_id="recommend")
    async def recommend(request: Request) -> Response:
        """Return the k best items for a user or a history."""
        body = await exchange.body(request, BODY)
        begin = exchange.service.recommendations.begin
        deadline_s = exchange.deadline_s(request, body.timeout_ms)
        work = await exchange.begin(begin, request, body, deadline_s)
        (outcome,) = await outcomes(request, [work], deadline_s)
        answer = finished(trace_of(request.scope), outcome)
        exchange.metrics.rounds.observe(answer.rounds)
        exchange.log_slate(body, answer)
        return json_response(answer)
