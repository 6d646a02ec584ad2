"""Finds the column that a file's author meant: other common names, and close spellings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Other names of each column, in lower-case letters and digits only.
OTHER_NAMES = {
    "item_id": (
        *("id", "item", "itemid", "iid", "movie", "movieid", "product", "productid", "asin"),
        *("parentasin", "sku", "isbn", "book", "bookid", "track", "trackid", "song", "songid"),
        *("article", "articleid", "video", "videoid", "content", "contentid", "goodsid"),
    ),
    "user_id": (
        *("user", "userid", "uid", "username", "customer", "customerid", "reviewerid"),
        *("visitor", "visitorid", "member", "memberid", "account", "accountid", "client"),
        *("clientid", "session", "sessionid"),
    ),
    "title": ("name", "itemname", "productname", "movietitle", "itemtitle", "producttitle"),
    "categories": ("category", "genre", "genres", "categoryname", "categorypath", "cat", "cats"),
    "available_from": (
        *("availableat", "availablesince", "validfrom", "startsat", "startdate", "publishedat"),
        *("publishdate", "publicationdate", "releasedate", "releasedat", "visiblefrom"),
    ),
    "expires_at": (
        *(
            "expiresat",
            "expires",
            "expiry",
            "expirydate",
            "expirationdate",
            "validuntil",
            "validto",
        ),
        *("endsat", "enddate", "availableuntil", "visibleuntil"),
    ),
    "timestamp": (
        *("time", "ts", "date", "datetime", "eventtime", "createdat", "unixtime", "unixreviewtime"),
        *("unixtimestamp", "eventtimestamp", "timestampms", "when", "occurredat"),
    ),
    "position": ("order", "rank", "sequence", "seq", "step", "index"),
    "type": ("event", "eventtype", "eventname", "action", "behavior", "behaviour", "interaction"),
    "value": ("rating", "ratings", "score", "stars", "overall", "weight"),
}
CLOSE = 0.8  # least similarity of a misspelt name


def suggest(name: str, absent: Iterable[str]) -> str | None:
    """Returns which of the absent columns a column's name stands for; None if it is none of them.

    Args:
        name: Name of a column that the file has.
        absent: Names of known columns that the file does not have.
    """
    plain = _plain(name)
    known = [column for column in absent if column != name]
    for column in known:
        if plain == _plain(column) or plain in OTHER_NAMES[column]:
            return column
    spellings = {_plain(column): column for column in known}
    near = difflib.get_close_matches(plain, spellings, 1, CLOSE)
    return spellings[near[0]] if near else None


def _plain(name: str) -> str:
    return re.sub(r"[^0-9a-z]", "", name.lower())
