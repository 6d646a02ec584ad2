"""Liveness, readiness, version, metrics."""

from __future__ import annotations

from importlib.metadata import version as installed

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from recserve.server.exchange import Exchange, json_response


def add_routes(app: FastAPI, exchange: Exchange) -> None:
    """Routes for operators; the health routes also have the names of vLLM and of `/v2`."""

    @app.get("/health/live", operation_id="live")
    @app.get("/v2/health/live", operation_id="live_v2")
    async def live() -> Response:
        """The process answers."""
        return json_response({"status": "live"})

    @app.get("/health", operation_id="health")
    @app.get("/health/ready", operation_id="ready")
    @app.get("/v2/health/ready", operation_id="ready_v2")
    async def ready() -> Response:
        """Requests are taken now; 503 while loading, draining or broken."""
        _ = exchange.served
        return json_response({"status": "ready"})

    @app.get("/version", operation_id="version")
    async def version() -> Response:
        """Versions of the program and of what it serves."""
        return json_response({"version": installed("recserve"), **exchange.served.versions()})

    @app.get("/metrics", operation_id="metrics")
    def metrics() -> Response:  # ten milliseconds, on a thread: other requests do not wait for it
        """Prometheus' text format."""
        return Response(exchange.metrics.page(), media_type=CONTENT_TYPE_LATEST)
