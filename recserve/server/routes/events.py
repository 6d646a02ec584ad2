"""Routes POST /v1/events, GET /v1/event-types, and GET and DELETE of a user's history."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.browse import UsersQuery
from recserve.schemas.events import EventsRequest, EventsResponse
from recserve.server.app_state import AppState, json_response, query_of
from recserve.server.routes.paths import HistoryRoute, UserRoute, add_get
from recserve.service.slate_log.records import attributed

BODY = msgspec.json.Decoder(EventsRequest)


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes of the history store; each waits for the store on a thread."""

    @app.post("/v1/events", operation_id="add_events")
    async def add_events(request: Request) -> Response:
        """Store events; the next answer takes them into account."""
        body = await app_state.body(request, BODY)
        return json_response(await app_state.from_store(_add, app_state, body))

    async def event_types() -> Response:
        """Return the names of the event types that events may have."""
        return json_response(app_state.service.histories.list_types())

    add_get(app, "/v1/event-types", event_types, "event_types")

    @app.get("/v1/users", operation_id="users")
    async def users(request: Request) -> Response:
        """Return a page of the users with stored events; `prefix`, `limit` and `after`."""
        query = query_of(request, UsersQuery)
        return json_response(
            await app_state.from_store(app_state.service.histories.list_users, query)
        )

    async def history(user_id: str) -> Response:
        """Return a user's events, oldest first."""
        return json_response(
            await app_state.from_store(app_state.service.histories.list_events, user_id)
        )

    async def delete_user(user_id: str) -> Response:
        """Delete a user's stored events, cached prefixes and rows of the slate log."""
        await app_state.from_store(_delete, app_state, user_id)
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


def _add(app_state: AppState, body: EventsRequest) -> EventsResponse:
    service, slates = app_state.service, app_state.slate_log
    answer = service.histories.add(body)
    if all(event.attribution_token is None for event in body.events):
        return answer
    refused = {rejection.index for rejection in answer.rejected}
    users = "none" if slates is None else slates.settings.users
    outcomes, wrong = attributed(body.events, refused, service.signer, users)
    for outcome in outcomes:
        if slates is not None:
            slates.outcome(outcome)
        if app_state.experiments is not None:
            said, event = outcome.attribution, outcome.event
            unit = event.user_id if said.user else said.request_id
            key = f"{outcome.token_id} {event.item_id}"
            kind = event.type or "event"
            app_state.experiments.count_event(said.experiment, said.arm, unit, kind, key)
    return structs.replace(answer, unattributed=wrong) if wrong else answer


def _delete(app_state: AppState, user_id: str) -> None:
    service = app_state.service
    service.histories.delete(user_id)
    if app_state.slate_log is not None:
        app_state.slate_log.forget(user_id, service.signer)
