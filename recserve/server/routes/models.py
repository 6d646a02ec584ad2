"""Routes GET /v1/models and /v1/models/{name}."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from recserve.server.app_state import AppState, json_response


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes that list models."""

    @app.get("/v1/models", operation_id="models")
    async def models() -> Response:
        """Return the served models in OpenAI's list format."""
        return json_response({"object": "list", "data": app_state.service.models()})

    @app.get("/v1/models/{name:path}", operation_id="model")
    async def model(name: str) -> Response:
        """Return one of the models."""
        return json_response(app_state.service.model(name))
