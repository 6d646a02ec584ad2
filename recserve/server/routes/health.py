"""Routes for operators: liveness, readiness, version, metrics."""

from __future__ import annotations

from importlib.metadata import version as installed

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.server.app_state import AppState, json_response
from recserve.server.routes.paths import add_get
from recserve.server.telemetry.metrics_format import OPENMETRICS, choose_format
from recserve.service.kernel_report import kernels_in_use


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes for operators; health routes also have the names of vLLM and of `/v2`."""

    async def live() -> Response:
        """Report that the process runs."""
        return json_response({"status": "live"})

    async def ready() -> Response:
        """Report that the server takes requests; 503 while loading, draining, failed or hung."""
        app_state.check_ready()
        return json_response({"status": "ready"})

    @app.get("/version", operation_id="version")
    def version() -> Response:  # not async: the first call may measure kernels
        """Return the versions of the program, the models and the catalogue, and the kernels."""
        service = app_state.service
        versions = {"version": installed("recserve"), **service.versions()}
        return json_response({**versions, "kernels": kernels_in_use(service.engine)})

    def metrics(request: Request) -> Response:  # not async: its ten milliseconds run on a thread
        """Return the metrics in the text format of Prometheus, or of OpenMetrics by `Accept`."""
        found = choose_format(",".join(request.headers.getlist("accept")))
        page = app_state.metrics.page(found == OPENMETRICS)
        return Response(page, headers={"Vary": "Accept"}, media_type=found)

    add_get(app, "/health/live", live, "live")
    add_get(app, "/v2/health/live", live, "live_v2")
    add_get(app, "/health", ready, "health")
    add_get(app, "/health/ready", ready, "ready")
    add_get(app, "/ping", ready, "ping")
    # Amazon SageMaker's and vLLM's name; some callers use POST.
    app.add_api_route("/ping", ready, methods=["POST"], operation_id="ping_post")
    add_get(app, "/v2/health/ready", ready, "ready_v2")
    add_get(app, "/metrics", metrics, "metrics")
