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
from recserve.experiments.serving.experiment import Experiment
from recserve.experiments.serving.registry import Experiments
from recserve.experiments.serving.settings import parse_experiments
from recserve.metrics import Metrics
from recserve.search.strategy import strategy_classes
from recserve.server import playground, routes
from recserve.server.access import Access, AccessKeys
from recserve.server.app_state import AppState
from recserve.server.arms.arm_server import RemoteArm
from recserve.server.arms.check import check_arms
from recserve.server.arms.collector import ExperimentCollector
from recserve.server.bundle_swaps import BundleSwaps
from recserve.server.errors import REASONS
from recserve.server.lifecycle import Lifecycle
from recserve.server.loader import ServiceLoader
from recserve.server.openapi import describe
from recserve.server.request_middleware import RequestMiddleware
from recserve.server.routing import make_routes
from recserve.server.telemetry.telemetry import Telemetry, vllm_model
from recserve.server.transport.quotas import Quotas
from recserve.server.transport.site_check import OriginCheck
from recserve.service import Service
from recserve.service.recommend import POPULAR
from recserve.service.service import SCORERS

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
    loader = ServiceLoader(config)

    experiments = Experiments(Experiment(one) for one in parse_experiments(config.experiments))

    def opened() -> Service:
        found = loader.first() if service is None else service
        check_arms(found, experiments)
        return found

    arm_servers = RemoteArm.open_all(arm for one in experiments for arm in one.arms)
    lifecycle = Lifecycle(opened)
    telemetry = Telemetry.open(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lifecycle.start()
        yield
        for server in arm_servers.values():
            await server.close()
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
    # All registered names, so that dashboards have the same series for every bundle.
    strategies = (*strategy_classes(), POPULAR)
    gauges = telemetry.gauges(lifecycle.gauges)
    metrics = Metrics((*strategies, *SCORERS), REASONS, gauges, vllm_model(config))
    swaps = BundleSwaps(
        lifecycle,
        loader,
        config.bundle,
        config.bundles_dir,
        metrics.bundle_swaps,
        lambda opened: check_arms(opened, experiments),
    )
    app_state = AppState(
        lifecycle,
        metrics,
        swaps,
        config.max_body_bytes,
        config.default_timeout_ms,
        config.text_timeout_ms,
        telemetry.slate_log,
        experiments,
        arm_servers=arm_servers,
        stall_timeout_s=config.stall_timeout_s,
    )
    table = make_routes()
    app.router.routes.extend(table)
    metrics.routes = frozenset(getattr(route, "path", "") for route in app.routes)
    metrics.arms = experiments.labels
    metrics.registry.register(ExperimentCollector(experiments))
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
    app.state.swaps = swaps
    app.state.metrics = metrics
    return app


async def _to_middleware(_: Request, error: Exception) -> Response:
    """Passes the framework's own errors to the middleware."""
    raise error
