"""Assembles the ASGI application: gate, routes and service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from importlib.metadata import version as installed

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from recserve.config import ConfigError, ServerConfig
from recserve.engine.engine_config import EngineConfig
from recserve.metrics import Gauges, Metrics
from recserve.search.strategies.registry import strategy_classes
from recserve.server import playground
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
from recserve.server.routes.paths import allowed_methods
from recserve.server.telemetry.logs import log_request
from recserve.server.telemetry.traces import Tracing, open_tracing
from recserve.server.transport.gate import Gate
from recserve.service import Service
from recserve.service.model_loader import resolve_device
from recserve.service.options import ServiceOptions
from recserve.service.recommend.recommend import POPULAR
from recserve.service.service import SCORERS
from recserve.service.slate_log.slate_log import SlateLog, SlateLogSettings
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
    slate_log, tracing = open_slate_log(config), _tracing(config)
    lifecycle = Lifecycle((lambda: load(config)) if service is None else (lambda: service))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lifecycle.start()
        yield
        await asyncio.to_thread(lifecycle.close)
        if slate_log is not None:
            await asyncio.to_thread(slate_log.close)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

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
    names = (*strategies, *SCORERS)

    def gauges() -> Gauges | None:
        found = lifecycle.gauges()
        if found is None or slate_log is None:
            return found
        return replace(found, slate_log=slate_log.counts)

    metrics = Metrics(names, REASONS, gauges, _vllm_model(config))
    exchange = Exchange(
        lifecycle,
        metrics,
        config.max_body_bytes,
        config.default_timeout_ms,
        config.text_timeout_ms,
        slate_log,
    )
    item_routes = (recommend, rank, events, items)
    for routes in (*item_routes, models, completions, text_scores, health, playground):
        routes.add_routes(app, exchange)
    metrics.routes = frozenset(getattr(route, "path", "") for route in app.routes)
    keys = tuple(key.get_secret_value() for key in config.api_keys)
    recorders = [log_request] if config.access_log else []
    if tracing is not None:
        recorders.append(tracing.record)
    app.add_middleware(
        Gate, lifecycle=lifecycle, metrics=metrics, api_keys=keys, recorders=recorders
    )
    app.add_exception_handler(HTTPException, _to_gate)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.state.lifecycle = lifecycle
    app.state.metrics = metrics
    return app


def _vllm_model(config: ServerConfig) -> str | None:
    """Returns the value of vLLM's label `model_name`; None without vLLM's metrics."""
    if config.metrics_compat is None:
        return None
    folder = "" if config.llm is None else config.llm.resolve().name
    return config.llm_name or folder


def open_slate_log(config: ServerConfig) -> SlateLog | None:
    """Opens the log of slates that the settings name. Raises ConfigError."""
    if config.slate_log is None:
        return None
    if config.signing_key is None:
        log.warning("slate_log without signing_key: the next process cannot verify these tokens")
    settings = SlateLogSettings(
        config.slate_log,
        config.slate_log_users,
        config.slate_log_rotate_s,
        config.slate_log_max_bytes,
    )
    try:
        return SlateLog(settings)
    except OSError as error:
        raise ConfigError(f"slate_log: {config.slate_log} cannot be used: {error}") from None


def _tracing(config: ServerConfig) -> Tracing | None:
    """Starts the traces that the settings ask for. Raises ConfigError without the extra `otel`."""
    if config.otlp_endpoint is None:
        return None
    try:
        return open_tracing(config.otlp_endpoint, config.otlp_sample_ratio)
    except ImportError as error:
        raise ConfigError(f"otlp_endpoint: pip install 'recserve[otel]' first ({error})") from None


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
