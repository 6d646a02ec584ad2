"""GET /v1/items/{id} and /v1/models."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from recserve.server.exchange import Exchange, json_response


def add_routes(app: FastAPI, exchange: Exchange) -> None:
    """Routes of the catalogue and the models."""

    @app.get("/v1/items/{item_id:path}", operation_id="item")
    async def item(item_id: str) -> Response:
        """What the catalogue knows of an item."""
        return json_response(exchange.service.item(item_id))

    @app.get("/v1/models", operation_id="models")
    async def models() -> Response:
        """The models of the bundle, in OpenAI's list form."""
        return json_response({"object": "list", "data": exchange.service.models()})
