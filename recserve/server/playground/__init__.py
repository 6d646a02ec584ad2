"""The playground at GET /: one page of static files with a strict content security policy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from recserve.schemas.api import Json, Pages
from recserve.server.context import RequestContext
from recserve.server.routing import handles

NUM_USERS = 50
NUM_ITEMS = 200
PAGE = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The browser runs and loads only what this server serves: no inline code, nothing from elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class StaticFile:
    """A file of the page.

    Attributes:
        body: Its bytes.
        headers: Headers of a response with or without the body.
    """

    body: bytes
    headers: dict[str, str]


@cache
def static_files() -> dict[str, StaticFile]:
    """Reads the files of the page from the package, by name."""
    found = {}
    for file in files(__package__).iterdir():
        kind = TYPES.get("." + file.name.rpartition(".")[2])
        if kind is None:
            continue
        body = file.read_bytes()
        headers = {
            "Content-Type": kind,
            # The browser keeps the file and asks each time whether it has changed.
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            "Content-Security-Policy": POLICY,
            "Referrer-Policy": "no-referrer",
        }
        found[file.name] = StaticFile(body, headers)
    return found


@handles(Pages.playground)
async def playground(context: RequestContext) -> Response:
    """Answers with the page."""
    return _answer(context, PAGE)


@handles(Pages.static)
async def static(context: RequestContext, name: str) -> Response:
    """Answers with a file of the page."""
    return _answer(context, name)


@handles(Pages.samples)
async def samples(context: RequestContext) -> Json:
    """Answers with users and items that the page offers."""
    return await context.from_store(context.service.samples, NUM_USERS, NUM_ITEMS)


@handles(Pages.recent)
async def recent(context: RequestContext) -> list[Any]:
    """Answers with the metrics of the last ten minutes."""
    return context.state.recent.samples


def _answer(context: RequestContext, name: str) -> Response:
    """Returns a file, or that the browser's copy is right. Raises HTTPException without one."""
    file = static_files().get(name)
    if file is None:
        raise HTTPException(404)
    if context.request.headers.get("if-none-match") == file.headers["ETag"]:
        return Response(None, 304, file.headers)
    return Response(file.body, headers=file.headers)
