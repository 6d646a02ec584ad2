"""Routes below /v1/users, told apart by the path as the client wrote it.

A user id may contain slashes. A literal `/history` at the end of a path names the user's history;
a slash that belongs to the id before it is written `%2F`.
"""

from __future__ import annotations

from urllib.parse import quote, unquote_to_bytes

from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

HISTORY = b"history"


class UserRoute(APIRoute):
    """The user itself. A path that ends with a literal `/history` does not match."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Returns how well the route fits the request."""
        match, child = super().matches(scope)
        if match is not Match.NONE:
            below_user = "/" in child["path_params"]["user_id"]
            if below_user and _last_segment(scope) == HISTORY:
                return Match.NONE, {}
        return match, child


class HistoryRoute(APIRoute):
    """The history of a user. A path whose last slash is written `%2F` does not match."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Returns how well the route fits the request."""
        match, child = super().matches(scope)
        if match is not Match.NONE and _last_segment(scope) != HISTORY:
            return Match.NONE, {}
        return match, child


def _last_segment(scope: Scope) -> bytes:
    """What follows the last literal slash, percent-decoded; slashes at the end do not count."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    return unquote_to_bytes(raw.rstrip(b"/").rpartition(b"/")[2])
