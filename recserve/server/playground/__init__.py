"""The playground at GET /: one self-contained page with a strict content security policy."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import Response

from recserve.server.exchange import Exchange, json_response
from recserve.server.routes.paths import add_get_and_head

NUM_USERS = 50
NUM_ITEMS = 200


def policy(page: str) -> str:
    """Returns a content security policy that allows only the page's own scripts and styles."""

    def sources(tag: str) -> str:
        blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [hashlib.sha256(block.encode()).digest() for block in blocks]
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def add_routes(app: FastAPI, exchange: Exchange) -> None:
    """Adds the page, and the sample users and items that it offers."""
    page = (files(__package__) / "index.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(page),
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    body = page.encode()

    async def playground() -> Response:
        return Response(body, headers=headers, media_type="text/html; charset=utf-8")

    add_get_and_head(app, "/", playground)

    @app.get("/playground/samples", include_in_schema=False)
    async def samples() -> Response:
        samples_of = exchange.service.samples
        return json_response(await asyncio.to_thread(samples_of, NUM_USERS, NUM_ITEMS))
