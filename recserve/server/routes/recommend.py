"""Route POST /v1/recommend."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.items import RecommendRequest
from recserve.server.arms.item_answer import answer_items
from recserve.server.arms.item_use import RECOMMEND
from recserve.server.exchange import Exchange, json_response

BODY = msgspec.json.Decoder(RecommendRequest)


def add_routes(app: FastAPI, exchange: Exchange) -> None:
    """Adds the route of the recommender."""

    @app.post("/v1/recommend", operation_id="recommend")
    async def recommend(request: Request) -> Response:
        """Return the k best items for a user or a history."""
        body = await exchange.body(request, BODY)
        # Read before the answer: the server may be draining when the answer is there.
        signer = exchange.service.runtime.signer
        answer = await answer_items(exchange, request, RECOMMEND, body)
        exchange.metrics.rounds.observe(answer.rounds)
        exchange.log_slate(body, answer, signer)
        return json_response(answer)
