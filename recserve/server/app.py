"""Assembles the ASGI application: middleware, routes and service.

The way of a request, from the first byte on:

1. `run` listens with uvicorn. `transport/listener` closes the port without losing a client.
2. `transport/connection` is the HTTP protocol: it feeds the parser, refuses what breaks a limit and
   writes responses. `connection_limits` names the limits, `header_count` counts headers,
   `request_timer` limits the time of each part, `pace` spreads a burst over turns of the event
   loop, `flow_control` pauses reading and ends clients that do not read.
3. `request_middleware` finds the row of the table (`routing`), makes the context (`context`),
   admits the client (`access`, `transport/quotas`, `transport/site_check`), turns errors into
   responses (`errors`) and records the end (`trace`, `telemetry/`).
4. FastAPI calls the route (`routing.OperationRoute`): it decodes the body and calls the handler in
   `routes/`, which asks the service and waits (`RequestContext.wait`) for its answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version as installed

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from recserve.config import ServerConfig
from recserve.metrics import Metrics, RecentMetrics
from recserve.search.strategy import strategy_classes
from recserve.server import playground, routes
from recserve.server.access import Access, AccessKeys
from recserve.server.context import AppState
from recserve.server.errors import CODES, REASONS
from recserve.server.lifecycle import Lifecycle
from recserve.server.loader import ServiceLoader
from recserve.server.openapi import describe
from recserve.server.request_middleware import RequestMiddleware
from recserve.server.routing import make_routes
from recserve.server.telemetry.telemetry import Telemetry, vllm_model
from recserve.server.threads import Threads
from recserve.server.transport.quotas import Quotas
from recserve.server.transport.site_check import OriginCheck
from recserve.service import Service
from recserve.service.effects import Effects
from recserve.service.rank import SCORERS
from recserve.service.similar import SIMILARITIES
from recserve.service.snapshot import LISTS

log = logging.getLogger(__name__)
HANDLERS = (routes, playground)  # these register the handlers of all operations


def create_app(config: ServerConfig, service: Service | None = None) -> FastAPI:
    """Returns an application for any ASGI server. Its lifespan loads and closes the service.

    `app.state.lifecycle` drains the service. `app.state.metrics` also counts requests that the
    connections refuse.

    Args:
        config: Settings of the server.
        service: An open service to use; None opens the one that `config` names.
    """
    arms = None
    if config.experiments:
        from recserve.server.experiments import Arms, ExperimentCollector

        arms = Arms(config)

    telemetry = Telemetry.open(config)
    # All registered names, so that dashboards have the same series for every bundle.
    strategies = (*strategy_classes(), *LISTS, *SIMILARITIES, *SCORERS)
    metrics = Metrics(
        strategies,
        REASONS,
        lambda: telemetry.add_logs(lifecycle.gauges()),
        vllm_model(config),
        CODES,
    )
    counts = None if arms is None else arms.experiments
    effects = Effects(telemetry.slate_log, telemetry.event_log, counts, metrics.rounds.observe)
    loader = ServiceLoader(config, service, effects)
    lifecycle = Lifecycle(loader, metrics.bundle_swaps, None if arms is None else arms.check)
    recent = RecentMetrics(metrics, lifecycle.gauges)
    heartbeat = None
    if config.catalog_url is not None:
        from recserve.server.heartbeat import Heartbeat

        heartbeat = Heartbeat(config, lifecycle)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lifecycle.start()
        recent.start()
        if heartbeat is not None:
            heartbeat.start()
        if arms is not None:
            arms.start()
        yield
        recent.close()
        if heartbeat is not None:
            await asyncio.to_thread(heartbeat.close)
        if arms is not None:
            await arms.close()
        await asyncio.to_thread(lifecycle.close)
        app_state.threads.close()
        await asyncio.to_thread(telemetry.close)

    app = FastAPI(
        title="recserve",
        version=installed("recserve"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app_state = AppState(
        lifecycle,
        metrics,
        recent,
        config.max_body_bytes,
        config.default_timeout_ms,
        config.text_timeout_ms,
        arms,
        stall_timeout_s=config.stall_timeout_s,
        threads=Threads(config.max_queue, config.queue_share),
        shared_catalog=config.catalog_log != "file" and config.bundle is not None,
        heartbeat=heartbeat,
    )
    if arms is not None:
        metrics.arms = arms.experiments.labels
        metrics.registry.register(ExperimentCollector(arms.experiments))
    table = make_routes()
    app.router.routes.extend(table)
    metrics.routes = frozenset(getattr(route, "path", "") for route in app.routes)
    keys = AccessKeys(
        api=tuple(key.get_secret_value() for key in config.api_keys),
        admin=tuple(key.get_secret_value() for key in config.admin_keys),
        quotas=None if config.key_quota is None else Quotas(config.key_quota),
    )
    sites = OriginCheck(config.host, config.allowed_hosts, not (keys.api or config.insecure))
    app.add_middleware(
        RequestMiddleware,
        state=app_state,
        routes=table,
        access=Access(keys, sites),
        recorders=telemetry.recorders,
    )
    app.add_exception_handler(HTTPException, _to_middleware)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.state.lifecycle = lifecycle
    app.state.metrics = metrics
    app.state.recent = recent
    return app


async def _to_middleware(_: Request, error: Exception) -> Response:
    """Passes the framework's own errors to the middleware."""
    raise error
