"""The playground at GET /: one page of static files with a strict content security policy."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from recserve.server.app_state import AppState, json_response
from recserve.server.routes.paths import add_get

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


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the page, its files, sample users and items, and the metrics of the last minutes."""
    there = static_files()

    def answer(request: Request, file: StaticFile) -> Response:
        if request.headers.get("if-none-match") == file.headers["ETag"]:
            return Response(None, 304, file.headers)
        return Response(file.body, headers=file.headers)

    async def playground(request: Request) -> Response:
        return answer(request, there[PAGE])

    async def static(request: Request, name: str) -> Response:
        if name not in there:
            raise HTTPException(404)
        return answer(request, there[name])

    @app.get("/playground/samples", include_in_schema=False)
    async def samples() -> Response:
        samples_of = app_state.service.samples
        return json_response(await asyncio.to_thread(samples_of, NUM_USERS, NUM_ITEMS))

    @app.get("/playground/recent", include_in_schema=False)
    async def recent() -> Response:
        return json_response(app_state.recent.samples)

    add_get(app, "/", playground)
    add_get(app, "/playground/{name}", static)
