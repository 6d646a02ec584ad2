"""The ASGI application: routes, the gate in front of them, the worker behind them."""

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
from recserve.engine.engine_config import EngineConfig
from recserve.metrics import Metrics
from recserve.server import (
    completions,
    events,
    health,
    items,
    models,
    playground,
    rank,
    recommend,
    text_scores,
)
from recserve.server.errors import REASONS
from recserve.server.exchange import Exchange
from recserve.server.gate import Gate
from recserve.server.methods import allowed_methods
from recserve.server.openapi import describe
from recserve.server.worker import Worker
from recserve.service import Service
from recserve.service.loading import resolve_device
from recserve.service.served import Served
from recserve.service.service import SCORERS, STRATEGIES
from recserve.service.text.text_loading import TextSettings, load_text

log = logging.getLogger(__name__)


def create_app(config: ServerConfig, served: Service | Served | None = None) -> FastAPI:
    """An application for any ASGI server; its lifespan loads and closes the service.

    served: something opened to use instead of loading what `config` names; the app closes it.
    `app.state.worker` is the worker, for whoever drains it; `app.state.metrics` counts what the
    connections refuse.
    """
    given = Served(served) if isinstance(served, Service) else served
    worker = Worker((lambda: load(config)) if given is None else (lambda: given))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.close)

    app = FastAPI(
        title="recserve",
        version=installed("recserve"),
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    metrics = Metrics((*STRATEGIES, *SCORERS), REASONS, worker.gauges)
    exchange = Exchange(
        worker,
        metrics,
        config.max_body_bytes,
        config.default_timeout_ms,
        config.text_timeout_ms,
    )
    items_rooms = (recommend, rank, events, items)
    for room in (*items_rooms, models, completions, text_scores, health, playground):
        room.add_routes(app, exchange)
    metrics.routes = frozenset(getattr(route, "path", "") for route in app.routes)
    keys = tuple(key.get_secret_value() for key in config.api_keys)
    app.add_middleware(Gate, worker=worker, metrics=metrics, api_keys=keys)
    app.add_exception_handler(HTTPException, _to_gate)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.state.worker = worker
    app.state.metrics = metrics
    return app


async def _to_gate(request: Request, error: Exception) -> Response:
    """Passes the framework's own refusals on to the gate; a 405 names all methods of the path."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = allowed_methods(request.app.routes, request.scope)
        raise HTTPException(405, headers={"Allow": allow}) from None
    raise error


def load(config: ServerConfig) -> Served:
    """Everything that the settings name, loaded; the engine runs. Raises what loading refuses."""
    text = None
    if config.llm is not None:
        settings = TextSettings(
            config.llm, config.llm_name, config.llm_dtype, config.chat_template, config.drafters
        )
        text = load_text(settings, resolve_device(config.device))
    if config.bundle is None:
        assert text is not None
        sizes = EngineConfig(
            max_queue=config.max_queue,
            kv_bytes=config.kv_bytes,
            kv_dtype=config.kv_dtype,
            load_aware=config.load_aware,
            graphs=config.graphs,
            invariant=config.invariant,
        )
        return Served.of_text(text, sizes)
    secret = config.signing_key
    items = Service.open(
        config.bundle,
        config.store,
        config.device,
        signing_key=None if secret is None else secret.get_secret_value().encode(),
        max_queue=config.max_queue,
        kv_bytes=config.kv_bytes,
        kv_dtype=config.kv_dtype,
        load_aware=config.load_aware,
        graphs=config.graphs,
        invariant=config.invariant,
        text=text,
        dtype=config.dtype,
        journal=config.journal,
        warm_drafts=config.warm_drafts,
    )
    if config.shadow is not None:
        items.compare_with(config.shadow, config.shadow_share)
    return Served(items, None if text is None else text.model)
