"""Routes of the catalogue: GET, PUT and DELETE of items, and rollback."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.browse import ItemsQuery
from recserve.schemas.items import ItemsRequest, RollbackRequest
from recserve.server.app_state import AppState, json_response, query_of

ITEMS = msgspec.json.Decoder(ItemsRequest)
ROLLBACK = msgspec.json.Decoder(RollbackRequest)


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes of the catalogue; changes wait for the disk on a thread."""

    @app.get("/v1/items", operation_id="items")
    async def items(request: Request) -> Response:
        """Return a page of the catalogue; `query`, `limit` and `after`."""
        query = query_of(request, ItemsQuery)
        return json_response(await app_state.from_store(app_state.service.items.listed, query))

    @app.put("/v1/items", operation_id="put_items")
    async def put_items(request: Request) -> Response:
        """Insert and update items; the next answer takes them into account."""
        body = await app_state.body(request, ITEMS)
        return json_response(await app_state.from_store(app_state.service.items.put, body))

    @app.post("/v1/items:rollback", operation_id="rollback_items")
    async def rollback_items(request: Request) -> Response:
        """Restore the items of an earlier catalogue version."""
        body = await app_state.body(request, ROLLBACK)
        return json_response(await app_state.from_store(app_state.service.rollback_items, body))

    @app.delete("/v1/items/{item_id:path}", operation_id="hide_item")
    async def hide_item(item_id: str) -> Response:
        """Remove an item from all answers."""
        return json_response(await app_state.from_store(app_state.service.hide_item, item_id))

    @app.get("/v1/items/{item_id:path}", operation_id="item")
    async def item(item_id: str) -> Response:
        """Return one item of the catalogue."""
        return json_response(app_state.service.items.get(item_id))
