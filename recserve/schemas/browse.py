"""Queries and responses of the routes that list items and users."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from recserve.schemas.items import StrictStruct

MAX_LISTED = 100
MAX_QUERY = 200

Limit = Annotated[int, Meta(ge=1, le=MAX_LISTED)]
Cursor = Annotated[str, Meta(max_length=512)]


class ItemsQuery(StrictStruct, frozen=True, kw_only=True):
    """Query of GET /v1/items.

    Attributes:
        query: Text that titles or ids contain, upper and lower case alike; empty matches all.
        limit: Most items of the page.
        after: `next` of the page before.
    """

    query: Annotated[str, Meta(max_length=MAX_QUERY)] = ""
    limit: Limit = 20
    after: Annotated[int, Meta(ge=0, le=2**53)] = 0


class UsersQuery(StrictStruct, frozen=True, kw_only=True):
    """Query of GET /v1/users.

    Attributes:
        prefix: First characters of the user ids; empty matches all.
        limit: Most users of the page.
        after: `next` of the page before.
    """

    prefix: Annotated[str, Meta(max_length=MAX_QUERY)] = ""
    limit: Limit = 20
    after: Cursor | None = None


class ListedItem(Struct, frozen=True, kw_only=True, gc=False):
    """One item of a page."""

    item_id: str
    title: str | None
    categories: list[str]
    semantic_id: list[int]
    popularity: float


class ItemPage(Struct, frozen=True, kw_only=True):
    """A page of the catalogue, most popular items first.

    Attributes:
        next: Value of `after` for the next page; None after the last one. A page may have fewer
            items than the limit, because a call looks at a bounded number of items.
        num_items: Items of the catalogue.
    """

    items: list[ListedItem]
    next: int | None
    num_items: int
    catalog_version: str


class UserPage(Struct, frozen=True, kw_only=True):
    """A page of user ids with stored events.

    Attributes:
        next: Value of `after` for the next page; None after the last one.
    """

    users: list[str]
    next: str | None = None
