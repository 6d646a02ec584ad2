"""User histories with the prefixes that are cached or precomputed from them."""

from __future__ import annotations

from msgspec import structs

from recserve.bounds import MAX_ID_LENGTH
from recserve.engine.engine import Engine
from recserve.schemas.browse import UserPage, UsersQuery
from recserve.schemas.events import (
    EventsRequest,
    EventsResponse,
    EventTypesResponse,
    HistoryResponse,
)
from recserve.schemas.items import InvalidRequest
from recserve.service.history.histories import Histories, Rewritten
from recserve.service.live_catalog import LiveCatalog
from recserve.service.prewarm import Prewarm


class UserHistories:
    """Adds, lists and deletes events, and keeps the prefix caches consistent with them.

    Attributes:
        successor: Engine of the service that replaces this one; it shares the store. Requests
            that are still in flight here also clear its caches. None before a replacement.
    """

    def __init__(
        self, engine: Engine, items: LiveCatalog, histories: Histories, prewarm: Prewarm
    ) -> None:
        self.engine, self.items, self.histories = engine, items, histories
        self.prewarm = prewarm
        self.successor: Engine | None = None

    def event_types(self) -> EventTypesResponse:
        """Returns the names of the event types that events may have."""
        return EventTypesResponse(event_types=list(self.histories.types.known))

    @property
    def blocks(self) -> bool:
        """True if reading a history may wait for a network."""
        return self.histories.store.blocks

    def close(self) -> None:
        """Closes the store, unless another service owns it."""
        self.histories.close()

    def add(self, body: EventsRequest) -> EventsResponse:
        """Stores events and corrections, and drops the cached prefixes that they invalidate.

        With `warm`, the engine precomputes the new prefixes of these users.

        Raises:
            StoreUnavailable: If the history store does not answer.
        """
        added = self.histories.add(body, self.items.current)
        self.prewarm.forget(added.rewritten)
        if self.successor is not None and added.rewritten:
            self.successor.forget_all()
        answer = added.answer
        if not body.warm:
            return answer
        refused = {rejection.index for rejection in answer.rejected}
        users = dict.fromkeys(e.user_id for i, e in enumerate(body.events) if i not in refused)
        return structs.replace(answer, warmed=self.prewarm.warm(users))

    def history(self, user_id: str) -> HistoryResponse:
        """Returns a user's stored events.

        Raises:
            StoreUnavailable: If the history store does not answer.
            CorruptHistory: If the stored events are damaged.
            InvalidRequest: If the id is empty or too long.
        """
        _check(user_id)
        return self.histories.listed(user_id, self.items.current)

    def listed(self, query: UsersQuery) -> UserPage:
        """Returns a page of users with stored events.

        Raises:
            InvalidRequest: If the cursor is not one of the history store.
            ListingUnsupported: If the history store cannot list its users.
            StoreUnavailable: If the history store does not answer.
        """
        store = self.histories.store
        try:
            found = store.users(query.prefix, query.limit, query.after)
            ids = _askable(found.ids)
            marks = len(found.ids) - len(ids)
            while marks and found.next is not None:  # others take the places of the marks
                found = store.users(query.prefix, marks, found.next)
                askable = _askable(found.ids)
                ids, marks = ids + askable, len(found.ids) - len(askable)
        except ValueError as error:
            raise InvalidRequest("after", str(error)) from None
        return UserPage(users=ids, next=found.next)

    def delete(self, user_id: str) -> None:
        """Removes a user from the history store and from the prefix caches.

        Raises:
            StoreUnavailable: If the history store does not answer.
            InvalidRequest: If the id is empty or too long.
        """
        _check(user_id)
        history = self.histories.delete(user_id, self.items.current)
        if self.items.has_changed_rows(history):
            self.engine.forget_all()
        self.prewarm.forget({user_id: Rewritten(history, None)})
        if self.successor is not None:
            self.successor.forget_all()


def _check(user_id: str) -> None:
    if not 1 <= len(user_id) <= MAX_ID_LENGTH:
        raise InvalidRequest(
            "user_id", f"expected 1 to {MAX_ID_LENGTH} characters, got {len(user_id)}"
        )


def _askable(user_ids: list[str]) -> list[str]:
    """Returns the ids that a request can name; longer ones are the service's own marks."""
    return [user_id for user_id in user_ids if len(user_id) <= MAX_ID_LENGTH]
