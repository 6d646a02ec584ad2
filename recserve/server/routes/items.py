"""Handlers of the catalogue: GET, PUT and DELETE of items, and rollback."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from recserve.schemas.api import Api
from recserve.schemas.browse import ItemPage, ItemsQuery
from recserve.schemas.items import (
    MAX_ITEMS,
    HideItemResponse,
    InvalidRequest,
    ItemResponse,
    ItemsRequest,
    ItemsResponse,
    RequestId,
    RollbackRequest,
    RollbackResponse,
    StrictStruct,
)
from recserve.schemas.numbers import exact_number
from recserve.server.body_decoder import MalformedBody
from recserve.server.context import RequestContext
from recserve.server.routing import handles


class PutBody(StrictStruct, frozen=True, kw_only=True):
    """The body of PUT /v1/items, before the numbers of its items are read."""

    items: Annotated[list[dict[str, msgspec.Raw]], Meta(min_length=1, max_length=MAX_ITEMS)]
    request_id: RequestId | None = None


PUT = msgspec.json.Decoder(PutBody)
EXACT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(float_hook=exact_number)
EMBEDDING: msgspec.json.Decoder[Any] = msgspec.json.Decoder()  # long, and read as doubles


async def _read_items(context: RequestContext) -> ItemsRequest:
    """Reads the body of PUT /v1/items."""
    return _items(await context.body(PUT))


@handles(Api.items)
async def items(context: RequestContext, query: ItemsQuery) -> ItemPage:
    """Answers with a page of the catalogue."""
    return await context.from_store(context.service.catalog.page, query)


@handles(Api.put_items, read=_read_items)
async def put_items(context: RequestContext, body: ItemsRequest) -> ItemsResponse:
    """Changes the catalogue, and waits for the disk on a thread."""
    return await context.from_store(context.service.catalog.put, body)


@handles(Api.rollback_items)
async def rollback_items(context: RequestContext, body: RollbackRequest) -> RollbackResponse:
    """Restores a version of the catalogue."""
    return await context.from_store(context.service.catalog.rollback, body)


@handles(Api.hide_item)
async def hide_item(context: RequestContext, item_id: str) -> HideItemResponse:
    """Hides an item."""
    return await context.from_store(context.service.catalog.hide_item, item_id)


@handles(Api.item)
async def item(context: RequestContext, item_id: str) -> ItemResponse:
    """Answers with one item."""
    return context.service.catalog.get(item_id)


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
