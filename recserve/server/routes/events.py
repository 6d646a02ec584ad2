"""Handlers of POST /v1/events, GET /v1/event-types, /v1/users, and of a user's history."""

from __future__ import annotations

from recserve.schemas.api import Api
from recserve.schemas.browse import UserPage, UsersQuery
from recserve.schemas.events import (
    EventsRequest,
    EventsResponse,
    EventTypesResponse,
    HistoryResponse,
)
from recserve.server.context import RequestContext
from recserve.server.routing import handles


@handles(Api.add_events)
async def add_events(context: RequestContext, body: EventsRequest) -> EventsResponse:
    """Stores events, and logs the outcomes of slates."""
    tracked, client = not context.untracked, context.client
    return await context.from_store(context.service.store_events, body, tracked, client)


@handles(Api.event_types)
async def event_types(context: RequestContext) -> EventTypesResponse:
    """Answers with the names of the types."""
    return context.service.histories.list_types()


@handles(Api.users)
async def users(context: RequestContext, query: UsersQuery) -> UserPage:
    """Answers with a page of user ids."""
    return await context.from_store(context.service.histories.list_users, query)


@handles(Api.history)
async def history(context: RequestContext, user_id: str) -> HistoryResponse:
    """Answers with a user's events."""
    return await context.from_store(context.service.histories.list_events, user_id)


@handles(Api.delete_user)
async def delete_user(context: RequestContext, user_id: str) -> None:
    """Forgets a user."""
    await context.from_store(context.service.forget_user, user_id)
