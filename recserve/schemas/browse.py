"""Queries and responses of the routes that list items and users."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from recserve.bounds import MAX_USER_ID_BYTES
from recserve.schemas.items import Id, StrictStruct

MAX_LISTED = 100
DEFAULT_LISTED = 20
MAX_QUERY = 200

# Parameters of URLs that hold several texts, see `split_texts`.
LISTS = frozenset({"ids"})

Limit = Annotated[int, Meta(ge=1, le=MAX_LISTED)]
Cursor = Annotated[str, Meta(max_length=512)]
UserCursor = Annotated[str, Meta(min_length=1, max_length=MAX_USER_ID_BYTES)]


def split_texts(joined: str) -> list[str]:
    """Divides a parameter of a URL at its commas.

    A backslash before a comma or before another backslash makes that character part of a text.
    """
    texts, text = [], ""
    for part in re.findall(r"\\[,\\]|,|[^,\\]+|\\", joined):
        if part == ",":
            texts.append(text)
            text = ""
        else:
            text += part[-1] if len(part) == 2 and part[0] == "\\" else part
    return [*texts, text]


def join_texts(texts: Sequence[str]) -> str:
    """Returns the parameter that `split_texts` divides into these texts."""
    return ",".join(re.sub(r"([,\\])", r"\\\1", text) for text in texts)


class ItemsQuery(StrictStruct, frozen=True, kw_only=True):
    """Query of GET /v1/items: either a search, or the items with given ids.

    Attributes:
        query: Text that titles or ids contain, upper and lower case alike; empty matches all.
        limit: Most items of the page; UNSET means DEFAULT_LISTED.
        after: `next` of the page before.
        ids: Ids of the items to return, in this order. No other field goes with it.
    """

    query: Annotated[str, Meta(max_length=MAX_QUERY)] = ""
    limit: Annotated[Limit, Meta(extra_json_schema={"default": DEFAULT_LISTED})] | UnsetType = UNSET
    after: Annotated[int, Meta(ge=0, le=2**53)] = 0
    ids: (
        Annotated[
            list[Id],
            Meta(
                min_length=1,
                max_length=MAX_LISTED,
                description="Without other parameters. A backslash before a comma or a backslash "
                "makes it part of an id.",
            ),
        ]
        | UnsetType
    ) = UNSET


class UsersQuery(StrictStruct, frozen=True, kw_only=True):
    """Query of GET /v1/users.

    Attributes:
        prefix: First characters of the user ids; empty matches all.
        limit: Most users of the page.
        after: `next` of the page before.
    """

    prefix: Annotated[str, Meta(max_length=MAX_QUERY)] = ""
    limit: Limit = DEFAULT_LISTED
    after: UserCursor | None = None


class ListedItem(Struct, frozen=True, kw_only=True, gc=False):
    """One item of a page.

    Attributes:
        attributes: Values of the other columns, in an answer to `ids` only.
        available_from: Time from which it may be in an answer, in an answer to `ids` only.
        expires_at: Time from which it may not, in an answer to `ids` only.
    """

    item_id: str
    title: str | None
    categories: list[str]
    semantic_id: list[int]
    popularity: float
    attributes: dict[str, Any] | UnsetType = UNSET
    available_from: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET


class ItemPage(Struct, frozen=True, kw_only=True):
    """A page of the catalogue, most popular items first, or the items of `ids` in their order.

    Attributes:
        next: Value of `after` for the next page; None after the last one. A page may have fewer
            items than the limit, because a call looks at a bounded number of items.
        num_items: Items of the catalogue.
        missing_item_ids: Those of `ids` that the catalogue does not have; UNSET without `ids`.
    """

    items: list[ListedItem]
    next: int | None
    num_items: int
    catalog_version: str
    missing_item_ids: list[str] | UnsetType = UNSET


class UserPage(Struct, frozen=True, kw_only=True):
    """A page of user ids with stored events.

    Attributes:
        next: Value of `after` for the next page; None after the last one.
    """

    users: list[str]
    next: str | None = None
