"""Requests and responses of the routes that store and return user events."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from recserve.schemas.items import (
    ID,
    OR_TYPE,
    TIME,
    Rejection,
    RequestId,
    StrictStruct,
)

MAX_EVENTS = 1000
REPLACE, REMOVE = "replace", "remove"

AnyId = Annotated[str, Meta(extra_json_schema={OR_TYPE: ID})]
AnyTime = Annotated[str, Meta(extra_json_schema={OR_TYPE: TIME})]
Correcting = Annotated[str, Meta(extra_json_schema={"enum": [REPLACE, REMOVE]})]


class EventInput(StrictStruct, frozen=True, kw_only=True, gc=False):
    """One event of a user. Each event is validated by itself; a bad one does not affect the others.

    Attributes:
        user_id: The user. An integer in the place of an id stands for its digits.
        item_id: The item; required unless `correction` is `remove`.
        type: Event type, one of GET /v1/event-types. None means `event`.
        timestamp: RFC 3339 time with a zone, or a number since 1970 in seconds, milliseconds,
            microseconds or nanoseconds. None means now; with `replace`, the stored time.
        event_id: Id of the event. An event with a stored id is a duplicate.
        value: A number that the event carries.
        correction: `replace` overwrites the user's stored event that has this event_id. `remove`
            deletes it, and reads user_id and event_id only. None stores a new event.
        attribution_token: Token of the response that led to the event. A token that is not valid,
            or of a response that did not show the item, is listed in `unattributed`, and the event
            is stored all the same.
    """

    user_id: AnyId
    item_id: AnyId | None = None
    type: str | None = None
    timestamp: AnyTime | None = None
    event_id: AnyId | None = None
    value: float | None = None
    correction: Correcting | None = None
    attribution_token: str | None = None

    def __post_init__(self) -> None:
        if self.item_id is None and self.correction is None:
            # msgspec's own message, so that the error equals that of other required fields.
            raise ValueError("Object missing required field `item_id`")


class EventsRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/events.

    Attributes:
        events: 1 to 1000 events.
        warm: Prewarm the users' prefixes now, and drafts for their probable requests, so that their
            next response is fast.
        request_id: Id of the request; None generates one.
    """

    events: Annotated[list[EventInput], Meta(min_length=1, max_length=MAX_EVENTS)]
    warm: bool = False
    request_id: RequestId | None = None


class EventsResponse(Struct, frozen=True, kw_only=True):
    """The outcome of an events call.

    Attributes:
        accepted: Number of new events.
        duplicates: Number of events whose event_id is stored already.
        corrected: Number of applied corrections.
        rejected: Refused events with their reasons.
        warmed: Number of prefixes being prewarmed. It is below users times models if the queue is
            full; the other prefixes are computed on demand.
        unattributed: Stored events that count for no response, with the reason: the attribution
            token is not valid, or its response did not show the item.
    """

    accepted: int
    duplicates: int
    corrected: int
    rejected: list[Rejection]
    warmed: int | UnsetType = UNSET
    unattributed: list[Rejection] | UnsetType = UNSET


class HistoryEvent(Struct, frozen=True, kw_only=True):
    """A stored event of a user.

    Attributes:
        item_id: The item.
        type: Event type.
        timestamp: RFC 3339 time; None if the event has a position only.
    """

    item_id: str
    type: str
    timestamp: str | None


class HistoryResponse(Struct, frozen=True, kw_only=True):
    """A user's events.

    Attributes:
        user_id: The user.
        events: Events, oldest first.
        unknown_items: Number of further events, whose items are no longer in the catalogue.
    """

    user_id: str
    events: list[HistoryEvent]
    unknown_items: int = 0


class EventTypesResponse(Struct, frozen=True, kw_only=True):
    """Names of the event types.

    Attributes:
        event_types: Names that POST /v1/events accepts: the 14 built-in ones, then those of the
            bundle's events and of the settings in order.
        kinds: Kind of each type. A `positive` event says that the user wants the item; a `read` one
            that he has seen it; a `negative` one that he does not want it.
        negative_below: Value below which an event is negative, for each type that has one.
    """

    event_types: list[str]
    kinds: dict[str, Literal["positive", "read", "negative"]]
    negative_below: dict[str, float]
