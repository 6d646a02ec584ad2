"""Routes POST /v1/events, and GET and DELETE of a user's history."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.events import EventsRequest
from recserve.schemas.items import MAX_ID_LENGTH, InvalidRequest
from recserve.server.exchange import Exchange, json_response
from recserve.server.routes.paths import HistoryRoute, UserRoute

BODY = msgspec.json.Decoder(EventsRequest)


def add_routes(app: FastAPI, exchange: Exchange) -> None:
    """Adds the routes of the history store; each waits for the store on a thread."""

    @app.post("/v1/events", operation_id="add_events")
    async def add_events(request: Request) -> Response:
        """Store events; the next answer takes them into account."""
        body = await exchange.body(request, BODY)
        return json_response(await asyncio.to_thread(exchange.service.users.add, body))

    async def history(user_id: str) -> Response:
        """Return a user's events, oldest first."""
        return json_response(
            await asyncio.to_thread(exchange.service.users.history, _bounded(user_id))
        )

    async def delete_user(user_id: str) -> Response:
        """Delete a user's stored events and cached prefixes."""
        await asyncio.to_thread(exchange.service.users.delete, _bounded(user_id))
        return Response(status_code=204)

    app.router.add_api_route(
        "/v1/users/{user_id:path}/history",
        history,
        methods=["GET"],
        operation_id="history",
        route_class_override=HistoryRoute,
    )
    app.router.add_api_route(
        "/v1/users/{user_id:path}",
        delete_user,
        methods=["DELETE"],
        operation_id="delete_user",
        status_code=204,
        route_class_override=UserRoute,
    )


def _bounded(user_id: str) -> str:
    if not 1 <= len(user_id) <= MAX_ID_LENGTH:
        raise InvalidRequest(
            "user_id", f"expected 1 to {MAX_ID_LENGTH} characters, got {len(user_id)}"
        )
    return user_id
