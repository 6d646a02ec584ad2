"""Methods of a path: GET together with HEAD, and the `Allow` header of a 405."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from fastapi import FastAPI
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

ORDER = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
Endpoint = Callable[[], Response] | Callable[[], Awaitable[Response]]


def add_get_and_head(
    app: FastAPI, path: str, endpoint: Endpoint, operation_id: str | None = None
) -> None:
    """Adds a route that answers HEAD like GET; the server leaves out the body.

    Args:
        app: The application that gets the route.
        path: Path of the route.
        endpoint: Makes the answer.
        operation_id: Name of the GET in the OpenAPI description; None leaves it out.
    """
    described = operation_id is not None
    app.add_api_route(
        path, endpoint, methods=["GET"], operation_id=operation_id, include_in_schema=described
    )
    app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> str:
    """Returns the methods of all routes that match the path of a request, joined by commas."""
    found: set[str] = set()
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return ", ".join(method for method in ORDER if method in found)
