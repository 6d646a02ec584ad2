"""Routes of the catalogue: GET, PUT and DELETE of items, and rollback."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.browse import ItemsQuery
from recserve.schemas.items import (
    MAX_ITEMS,
    InvalidRequest,
    ItemsRequest,
    RequestId,
    RollbackRequest,
    StrictStruct,
)
from recserve.schemas.numbers import exact_number
from recserve.server.app_state import AppState, json_response, query_of
from recserve.server.body_decoder import MalformedBody


class PutBody(StrictStruct, frozen=True, kw_only=True):
    """The body of PUT /v1/items, before the numbers of its items are read."""

    items: Annotated[list[dict[str, msgspec.Raw]], Meta(min_length=1, max_length=MAX_ITEMS)]
    request_id: RequestId | None = None


PUT = msgspec.json.Decoder(PutBody)
EXACT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(float_hook=exact_number)
EMBEDDING: msgspec.json.Decoder[Any] = msgspec.json.Decoder()  # long, and read as doubles
ROLLBACK = msgspec.json.Decoder(RollbackRequest)


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes of the catalogue; changes wait for the disk on a thread."""

    @app.get("/v1/items", operation_id="items")
    async def items(request: Request) -> Response:
        """Return a page of the catalogue, or the items of `ids`."""
        query = query_of(request, ItemsQuery)
        return json_response(await app_state.from_store(app_state.service.catalog.page, query))

    @app.put("/v1/items", operation_id="put_items")
    async def put_items(request: Request) -> Response:
        """Insert and update items; the next answer takes them into account."""
        body = _items(await app_state.body(request, PUT))
        return json_response(await app_state.from_store(app_state.service.catalog.put, body))

    @app.post("/v1/items:rollback", operation_id="rollback_items")
    async def rollback_items(request: Request) -> Response:
        """Restore the items of an earlier catalogue version."""
        body = await app_state.body(request, ROLLBACK)
        return json_response(await app_state.from_store(app_state.service.catalog.rollback, body))

    @app.delete("/v1/items/{item_id:path}", operation_id="hide_item")
    async def hide_item(item_id: str) -> Response:
        """Remove an item from all answers."""
        return json_response(
            await app_state.from_store(app_state.service.catalog.hide_item, item_id)
        )

    @app.get("/v1/items/{item_id:path}", operation_id="item")
    async def item(item_id: str) -> Response:
        """Return one item of the catalogue."""
        return json_response(app_state.service.catalog.get(item_id))


def _items(body: PutBody) -> ItemsRequest:
    """Reads the items with exact numbers.

    Raises:
        MalformedBody: If a text is not UTF-8.
        InvalidRequest: If a number is too large.
    """
    items: list[dict[str, Any]] = []
    for index, raw in enumerate(body.items):
        item: dict[str, Any] = {}
        for name, value in raw.items():
            decoder = EMBEDDING if name == "embedding" else EXACT
            try:
                item[name] = decoder.decode(value)
            except UnicodeDecodeError as error:
                raise MalformedBody(f"the body is not valid JSON: {error}") from None
            except (msgspec.DecodeError, RecursionError):
                place = f"items[{index}].{name[:64]}"
                raise InvalidRequest(
                    place, "a number is too large, or it is nested too deep"
                ) from None
        items.append(item)
    return ItemsRequest(items=items, request_id=body.request_id)
