"""Finds the column that a file's author meant: other common names, and close spellings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

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
    "event_id": ("eventuuid", "eventkey", "uuid"),
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


def check_columns(columns: Mapping[str, str], tables: Mapping[str, Iterable[str]]) -> None:
    """Raises ValueError if names of `--column` cannot belong to any file.

    Args:
        columns: Name in the file by our name. `TABLE.NAME` is the column of one table alone.
        tables: Our names by table.
    """
    every = list(dict.fromkeys(name for known in tables.values() for name in known))
    for ours, theirs in columns.items():
        table, dot, name = ours.rpartition(".")
        if not theirs:
            raise ValueError(f"column {ours} has no name; expected the name of a column")
        if (name not in tables.get(table, ())) if dot else ours not in every:
            homes = [f"{one}.{name}" for one in tables if name in tables[one]]
            near = homes[0] if homes else _nearest(name, every)
            there = f"did you mean {near}?" if near else f"expected one of {', '.join(every)}"
            raise ValueError(f"unknown column {ours!r}; {there}")
    for table, known in tables.items():
        owners: dict[str, str] = {}
        for ours, theirs in names_of_table(columns, table, known).items():
            if theirs in owners:
                raise ValueError(f"column {theirs!r} is named as {owners[theirs]} and as {ours}")
            owners[theirs] = ours


def names_of_table(columns: Mapping[str, str], table: str, known: Iterable[str]) -> dict[str, str]:
    """Returns the names in one file by our names. `TABLE.NAME` has precedence."""
    own = {name: columns[name] for name in known if name in columns}
    prefix = f"{table}."
    return own | {
        ours.removeprefix(prefix): theirs
        for ours, theirs in columns.items()
        if ours.startswith(prefix)
    }


def rename_columns(
    names: Sequence[str], given: Mapping[str, str], shared: Iterable[str] = ()
) -> list[str | None]:
    """Returns our names of a file's columns; None for a column whose name another one takes.

    Args:
        names: Names in the file.
        given: Name in the file by our name.
        shared: Our names that other files may mean; a file that has them is read as it is.

    Raises:
        ValueError: If the file lacks a name.
    """
    ours_of: dict[str, str] = {}
    for ours, theirs in given.items():
        if theirs in names:
            ours_of[theirs] = ours
        elif ours not in shared or ours not in names:
            near = _nearest(theirs, names)
            hint = f"did you mean {near}?" if near else f"the file has {list_names(names)}"
            raise ValueError(f"column {theirs} is missing, which --column {ours} names; {hint}")
    taken = set(ours_of.values())
    return [ours_of.get(name, None if name in taken else name) for name in names]


def list_names(names: Sequence[str]) -> str:
    """Returns the names of a file's columns for a message, the first 50 of them."""
    rest = f" and {len(names) - 50} more" if len(names) > 50 else ""
    return ", ".join(names[:50]) + rest


def _nearest(name: str, there: Sequence[str]) -> str | None:
    spellings = {_plain(one): one for one in reversed(there)}
    near = difflib.get_close_matches(_plain(name), spellings, 1)
    return spellings[near[0]] if near else None
