"""Routes POST /admin/bundle:load and /admin/bundle:rollback, and GET /admin/bundle."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.admin import BundleLoadRequest
from recserve.server.app_state import AppState, json_response

BODY = msgspec.json.Decoder(BundleLoadRequest)


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes that replace the bundle. The gate asks for an admin key."""
    lifecycle = app_state.lifecycle

    @app.post("/admin/bundle:load", operation_id="load_bundle", status_code=202)
    async def load_bundle(request: Request) -> Response:
        """Start to load another bundle; the current one answers until it is ready."""
        body = await app_state.body(request, BODY)
        return json_response(await asyncio.to_thread(lifecycle.load, body.path, body.force), 202)

    @app.post("/admin/bundle:rollback", operation_id="rollback_bundle", status_code=202)
    async def rollback_bundle() -> Response:
        """Start to restore the previous bundle."""
        return json_response(await asyncio.to_thread(lifecycle.rollback), 202)

    @app.get("/admin/bundle", operation_id="bundle_status")
    async def bundle_status() -> Response:
        """Return the current and the previous bundle, and the state of the latest load."""
        return json_response(lifecycle.status())
