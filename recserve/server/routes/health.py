"""Liveness, readiness, version, metrics."""

from __future__ import annotations

from importlib.metadata import version as installed

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from recserve.server.exchange import Exchange, json_response
from recserve.server.routes.paths import add_get_and_head


def add_routes(app: FastAPI, exchange: Exchange) -> None:
    """Routes for operators; the health routes also have the names of vLLM and of `/v2`."""

    async def live() -> Response:
        """The process answers."""
        return json_response({"status": "live"})

    async def ready() -> Response:
        """Requests are taken now; 503 while loading, draining or broken."""
        _ = exchange.service
        return json_response({"status": "ready"})

    @app.get("/version", operation_id="version")
    async def version() -> Response:
        """Versions of the program and of what it serves."""
        return json_response({"version": installed("recserve"), **exchange.service.versions()})

    def metrics() -> Response:  # ten milliseconds, on a thread: other requests do not wait for it
        """Prometheus' text format."""
        return Response(exchange.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    add_get_and_head(app, "/health/live", live, "live")
    add_get_and_head(app, "/v2/health/live", live, "live_v2")
    add_get_and_head(app, "/health", ready, "health")
    add_get_and_head(app, "/health/ready", ready, "ready")
    add_get_and_head(app, "/v2/health/ready", ready, "ready_v2")
    add_get_and_head(app, "/metrics", metrics, "metrics")
