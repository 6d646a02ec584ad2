"""Assembles the ASGI application: gate, routes and service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from importlib.metadata import version as installed

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from recserve.config import ServerConfig
from recserve.engine.engine_config import EngineConfig
from recserve.experiments.serving.experiment import Experiment
from recserve.experiments.serving.registry import Experiments
from recserve.experiments.serving.settings import parse_experiments
from recserve.metrics import Metrics
from recserve.search.strategies.registry import strategy_classes
from recserve.server import playground
from recserve.server.arms.check import check_arms
from recserve.server.arms.collector import ExperimentCollector
from recserve.server.errors import REASONS
from recserve.server.exchange import Exchange
from recserve.server.lifecycle import Lifecycle
from recserve.server.openapi import describe
from recserve.server.routes import (
    completions,
    events,
    health,
    items,
    models,
    rank,
    recommend,
    text_scores,
)
from recserve.server.routes import experiments as experiment_routes
from recserve.server.routes.paths import allowed_methods
from recserve.server.telemetry.telemetry import Telemetry, vllm_model
from recserve.server.transport.gate import Gate
from recserve.service import Service
from recserve.service.model_loader import resolve_device
from recserve.service.options import ServiceOptions
from recserve.service.recommend.recommend import POPULAR
from recserve.service.service import SCORERS
from recserve.service.text.loader import TextSettings, load_text

# Names that EngineConfig and ServerConfig share; these settings pass through unchanged.
ENGINE_SETTINGS = sorted(
    {field.name for field in fields(EngineConfig)} & set(ServerConfig.model_fields)
)

log = logging.getLogger(__name__)


def create_app(config: ServerConfig, service: Service | None = None) -> FastAPI:
    """Returns an application for any ASGI server. Its lifespan loads and closes the service.

    `app.state.lifecycle` drains the service. `app.state.metrics` also counts requests that the
    connections refuse.

    Args:
        config: Settings of the server.
        service: An open service to use; None opens the one that `config` names.
    """
    telemetry = Telemetry.open(config)
    experiments = Experiments(Experiment(one) for one in parse_experiments(config.experiments))

    def opened() -> Service:
        found = load(config) if service is None else service
        check_arms(found, experiments)
        return found

    lifecycle = Lifecycle(opened)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lifecycle.start()
        yield
        await asyncio.to_thread(lifecycle.close)
        await asyncio.to_thread(telemetry.close)

    app = FastAPI(
        title="recserve",
        version=installed("recserve"),
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    # All registered names, so that dashboards have the same series for every bundle.
    strategies = (*strategy_classes(), POPULAR)
    gauges = telemetry.gauges(lifecycle.gauges)
    metrics = Metrics((*strategies, *SCORERS), REASONS, gauges, vllm_model(config))
    exchange = Exchange(
        lifecycle,
        metrics,
        config.max_body_bytes,
        config.default_timeout_ms,
        config.text_timeout_ms,
        telemetry.slate_log,
        experiments,
    )
    item_routes = (recommend, rank, events, items, experiment_routes)
    for routes in (
        *item_routes,
        models,
        completions,
        text_scores,
        health,
        playground,
    ):
        routes.add_routes(app, exchange)
    metrics.routes = frozenset(getattr(route, "path", "") for route in app.routes)
    metrics.arms = experiments.labels
    metrics.registry.register(ExperimentCollector(experiments))
    keys = tuple(key.get_secret_value() for key in config.api_keys)
    admin_keys = tuple(key.get_secret_value() for key in config.admin_keys)
    app.add_middleware(
        Gate,
        lifecycle=lifecycle,
        metrics=metrics,
        api_keys=keys,
        admin_keys=admin_keys,
        recorders=telemetry.recorders,
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


def load(config: ServerConfig) -> Service:
    """Opens the service that the settings name, with a running engine."""
    engine = EngineConfig(**{name: getattr(config, name) for name in ENGINE_SETTINGS})
    text = None
    if config.llm is not None:
        settings = TextSettings(
            config.llm, config.llm_name, config.llm_dtype, config.chat_template, config.drafters
        )
        text = load_text(settings, resolve_device(config.device))
    if config.bundle is None:
        assert text is not None
        return Service.of_text(text, engine)
    secret = config.signing_key
    options = ServiceOptions(
        engine=engine,
        dtype=config.dtype,
        signing_key=None if secret is None else secret.get_secret_value().encode(),
        journal=config.journal,
        text=text,
    )
    service = Service.open(config.bundle, config.store, config.device, options)
    if config.shadow is not None:
        service.compare_with(config.shadow, config.shadow_share)
    return service
