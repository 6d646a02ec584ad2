"""Handlers of POST /v1/events, GET /v1/event-types, /v1/users, and of a user's history."""

from __future__ import annotations

from msgspec import structs

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
from recserve.service.slate_log.records import verify_tokens


@handles(Api.add_events)
async def add_events(context: RequestContext, body: EventsRequest) -> EventsResponse:
    """Stores events, and logs the outcomes of slates."""
    return await context.from_store(_add, context, body)


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
    await context.from_store(_delete, context, user_id)


def _add(context: RequestContext, body: EventsRequest) -> EventsResponse:
    service, slates = context.service, context.state.slate_log
    experiments = context.state.experiments
    answer = service.histories.add(body, popular=not context.untracked)
    if all(event.attribution_token is None for event in body.events):
        return answer
    refused = {rejection.index for rejection in answer.rejected}
    users = "none" if slates is None else slates.settings.users
    outcomes, wrong = verify_tokens(body.events, refused, service.signer, users)
    for outcome in () if context.untracked else outcomes:
        if slates is not None:
            slates.outcome(outcome)
        if experiments is not None:
            said, event = outcome.attribution, outcome.event
            unit = event.user_id if said.user else said.request_id
            key = f"{outcome.token_id} {event.item_id}"
            kind = event.type or "event"
            arm = said.arm
            if said.interleaved:
                arm = experiments.team(said.experiment, outcome.team)
            experiments.count_event(said.experiment, arm, unit, kind, key)
    return structs.replace(answer, unattributed=wrong) if wrong else answer


def _delete(context: RequestContext, user_id: str) -> None:
    service = context.service
    service.histories.delete(user_id)
    if context.state.slate_log is not None:
        context.state.slate_log.forget(user_id, service.signer)
