"""Path matching: GET routes, the `Allow` header of a 405, and ids with any characters.

A path parameter `{name:path}` matches any characters, newlines too. A user id may contain slashes.
A literal `/history` at the end of a path names the user's history. If the id itself ends with
`/history`, its last slash is written `%2F`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import quote, unquote_to_bytes

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

HISTORY = b"history"
ORDER = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
Endpoint = Callable[..., Response] | Callable[..., Awaitable[Response]]


class AnyText(PathConvertor):
    """Path parameter of any characters. The framework's own does not match newlines."""

    regex = r"[\s\S]*"


register_url_convertor("path", AnyText())


def add_get(app: FastAPI, path: str, endpoint: Endpoint, operation_id: str | None = None) -> None:
    """Adds a GET route. The gate answers HEAD like GET.

    Args:
        app: The application that gets the route.
        path: Path of the route.
        endpoint: Returns the response.
        operation_id: Name of the route in the OpenAPI description; None omits the route.
    """
    described = operation_id is not None
    app.add_api_route(
        path, endpoint, methods=["GET"], operation_id=operation_id, include_in_schema=described
    )


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> str:
    """Returns the methods of all routes that match the path of a request, joined by commas.

    HEAD is answered wherever GET is.
    """
    found: set[str] = set()
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    if "GET" in found:
        found.add("HEAD")
    return ", ".join(method for method in ORDER if method in found)


class UserRoute(APIRoute):
    """Route of a user. A path below a user that ends with a literal `/history` does not match."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Returns how well the route fits the request."""
        match, child = super().matches(scope)
        if match is not Match.NONE:
            below_user = "/" in child["path_params"]["user_id"]
            if below_user and _last_segment(scope) == HISTORY:
                return Match.NONE, {}
        return match, child


class HistoryRoute(APIRoute):
    """Route of a user's history. A path whose last slash is written `%2F` does not match."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Returns how well the route fits the request."""
        match, child = super().matches(scope)
        if match is not Match.NONE and _last_segment(scope) != HISTORY:
            return Match.NONE, {}
        return match, child


def _last_segment(scope: Scope) -> bytes:
    """Returns the percent-decoded part after the last literal slash; ignores trailing slashes."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    return unquote_to_bytes(raw.rstrip(b"/").rpartition(b"/")[2])
