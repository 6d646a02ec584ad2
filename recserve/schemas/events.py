"""Bodies and answers of the routes that take and tell what users did."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from recserve.schemas.items import Rejection, RequestId, StrictStruct

MAX_EVENTS = 1000
REPLACE, REMOVE = "replace", "remove"

Correcting = Annotated[str, Meta(extra_json_schema={"enum": [REPLACE, REMOVE]})]


class EventInput(StrictStruct, frozen=True, kw_only=True, gc=False):
    """One event. Its values are judged row by row: a bad row does not refuse its neighbours.

    correction: `replace`: the user's stored event with this event_id becomes this one, at its
    stored time where this one has none; `remove`: it goes, and user_id and event_id are all that
    is read. item_id: required but for `remove`.
    """

    user_id: str
    item_id: str | None = None
    type: str | None = None
    timestamp: str | None = None
    event_id: str | None = None
    value: float | None = None
    correction: Correcting | None = None

    def __post_init__(self) -> None:
        if self.item_id is None and self.correction is None:
            # The words for any field that is required, so that it is refused like one.
            raise ValueError("Object missing required field `item_id`")


class EventsRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/events. warm: compute the users' roots now, and drafts for what they will probably
    ask, so that their next answer is quick.
    """

    events: Annotated[list[EventInput], Meta(min_length=1, max_length=MAX_EVENTS)]
    warm: bool = False
    request_id: RequestId | None = None


class EventsResponse(Struct, frozen=True, kw_only=True):
    """What became of each event. warmed: roots under way; those the queue has no room for are not.

    Fewer than users times models: the rest is computed when it is asked for.
    """

    accepted: int
    duplicates: int
    corrected: int
    rejected: list[Rejection]
    warmed: int | UnsetType = UNSET


class HistoryEvent(Struct, frozen=True, kw_only=True):
    """timestamp: RFC 3339; None where the event came with a position only."""

    item_id: str
    type: str
    timestamp: str | None


class HistoryResponse(Struct, frozen=True, kw_only=True):
    """A user's events, oldest first. unknown_items: further events, of items that are gone."""

    user_id: str
    events: list[HistoryEvent]
    unknown_items: int = 0
