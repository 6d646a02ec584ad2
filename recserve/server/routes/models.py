"""Handlers of GET /v1/models and /v1/models/{name}."""

from __future__ import annotations

from recserve.schemas.api import Api, Json
from recserve.server.context import RequestContext
from recserve.server.routing import handles


@handles(Api.models)
async def models(context: RequestContext) -> Json:
    """Answers with all models."""
    return {"object": "list", "data": context.service.models()}


@handles(Api.model)
async def model(context: RequestContext, name: str) -> Json:
    """Answers with one model."""
    return context.service.model(name)
