"""Route POST /v1/recommend."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.items import RecommendRequest
from recserve.schemas.numbers import exact_number
from recserve.server.app_state import AppState, json_response

BODY = msgspec.json.Decoder(RecommendRequest, float_hook=exact_number)


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the route of the recommender."""

    @app.post("/v1/recommend", operation_id="recommend")
    async def recommend(request: Request) -> Response:
        """Return the k best items for a user or a history."""
        body = await app_state.body(request, BODY)
        # Read before the answer: the server may be draining when the answer is there.
        service = app_state.service
        begin, signer = service.recommender.begin, service.signer
        answer = await app_state.answer_items(app_state, request, service, begin, body)
        app_state.metrics.rounds.observe(answer.rounds)
        app_state.log_slate(body, answer, signer)
        return json_response(answer)
