"""Assembles the ASGI application: gate, routes and service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version as installed

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from recserve.config import ServerConfig
from recserve.metrics import Metrics
from recserve.search.strategy import strategy_classes
from recserve.server import playground
from recserve.server.app_state import AppState, answer_items
from recserve.server.errors import REASONS
from recserve.server.lifecycle import Lifecycle
from recserve.server.loader import ServiceLoader
from recserve.server.openapi import describe
from recserve.server.routes import (
    bundle_admin,
    completions,
    encoding,
    events,
    health,
    inference,
    items,
    models,
    rank,
    recommend,
    text_scores,
)
from recserve.server.routes import experiments as experiment_routes
from recserve.server.routes.paths import allowed_methods
from recserve.server.telemetry.telemetry import Telemetry, vllm_model
from recserve.server.transport.gate import AccessKeys, Gate
from recserve.server.transport.quotas import Quotas
from recserve.server.transport.site_check import OriginCheck
from recserve.service import Service
from recserve.service.recommend import POPULAR
from recserve.service.service import SCORERS

log = logging.getLogger(__name__)


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

        arms = Arms(config.experiments)

    telemetry = Telemetry.open(config)
    # All registered names, so that dashboards have the same series for every bundle.
    strategies = (*strategy_classes(), POPULAR, *SCORERS)
    metrics = Metrics(
        strategies,
        REASONS,
        lambda: telemetry.add_slate_log(lifecycle.gauges()),
        vllm_model(config),
    )
    loader = ServiceLoader(config, service)
    lifecycle = Lifecycle(loader, metrics.bundle_swaps, None if arms is None else arms.check)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lifecycle.start()
        yield
        if arms is not None:
            await arms.close()
        await asyncio.to_thread(lifecycle.close)
        app_state.threads.close()
        await asyncio.to_thread(telemetry.close)

    app = FastAPI(
        title="recserve",
        version=installed("recserve"),
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app_state = AppState(
        lifecycle,
        metrics,
        answer_items,
        completions.write_texts,
        config.max_body_bytes,
        config.default_timeout_ms,
        config.text_timeout_ms,
        telemetry.slate_log,
        stall_timeout_s=config.stall_timeout_s,
    )
    if arms is not None:
        app_state = replace(
            app_state,
            answer_items=arms.answer_items,
            write_texts=arms.write_texts,
            experiments=arms.experiments,
        )
        metrics.arms = arms.experiments.labels
        metrics.registry.register(ExperimentCollector(arms.experiments))
    item_routes = (recommend, rank, inference, events, items, experiment_routes)
    text_routes = (models, completions, text_scores, encoding)
    for routes in (*item_routes, *text_routes, health, playground, bundle_admin):
        routes.add_routes(app, app_state)
    metrics.routes = frozenset(getattr(route, "path", "") for route in app.routes)
    keys = AccessKeys(
        api=tuple(key.get_secret_value() for key in config.api_keys),
        admin=tuple(key.get_secret_value() for key in config.admin_keys),
        quotas=None if config.key_quota is None else Quotas(config.key_quota),
    )
    app.add_middleware(
        Gate,
        lifecycle=lifecycle,
        metrics=metrics,
        keys=keys,
        recorders=telemetry.recorders,
        sites=OriginCheck(config.host, config.allowed_hosts, not (keys.api or config.insecure)),
    )
    app.add_exception_handler(HTTPException, _to_gate)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.state.lifecycle = lifecycle
    app.state.metrics = metrics
    return app


async def _to_gate(request: Request, error: Exception) -> Response:
    """Passes the framework's own errors to the gate; a 405 lists all methods of the path."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = allowed_methods(request.app.routes, request.scope)
        raise HTTPException(405, headers={"Allow": allow}) from None
    raise error
