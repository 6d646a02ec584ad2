"""GET /v1/items/{id}."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from recserve.server.exchange import Exchange, json_response


def add_routes(app: FastAPI, exchange: Exchange) -> None:
    """Routes of the catalogue."""

    @app.get("/v1/items/{item_id:path}", operation_id="item")
    async def item(item_id: str) -> Response:
        """What the catalogue knows of an item."""
        return json_response(exchange.service.item(item_id))
