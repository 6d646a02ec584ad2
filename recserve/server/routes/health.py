"""Handlers for operators: liveness, readiness, version, metrics, the description of the API."""

from __future__ import annotations

from importlib.metadata import version as installed

from fastapi import FastAPI
from starlette.responses import Response

from recserve.doctor.kernel_report import kernels_in_use
from recserve.schemas.api import Api, Json, Pages
from recserve.server.context import RequestContext
from recserve.server.errors import NotReady
from recserve.server.routing import handles
from recserve.server.telemetry.metrics_format import OPENMETRICS, choose_format


@handles(Api.live, Api.live_v2)
async def live(context: RequestContext) -> Json:
    """Answers without the service."""
    return {"status": "live"}


@handles(Api.health, Api.ready, Api.ready_v2, Api.ping, Pages.ping_post)
async def ready(context: RequestContext) -> Json:
    """Answers while the server takes requests and no step of the engine hangs."""
    engine = context.service.engine
    if engine.stalled_s > context.state.stall_timeout_s:
        raise NotReady(f"a step of the engine has been running for {engine.stalled_s:.0f} s")
    return {"status": "ready"}


@handles(Api.version)
def version(context: RequestContext) -> Json:
    """Answers with versions. The first call may measure kernels, so it runs on a thread."""
    service = context.service
    versions = {"version": installed("recserve"), **service.versions()}
    return {**versions, "kernels": kernels_in_use(service.engine)}


@handles(Api.metrics)
def metrics(context: RequestContext) -> Response:
    """Answers with the metrics. It takes ten milliseconds, so it runs on a thread."""
    found = choose_format(",".join(context.request.headers.getlist("accept")))
    page = context.state.metrics.page(found == OPENMETRICS)
    return Response(page, headers={"Vary": "Accept"}, media_type=found)


@handles(Pages.openapi)
async def openapi(context: RequestContext) -> Json:
    """Answers with the description of the API."""
    app: FastAPI = context.request.app
    return app.openapi()
