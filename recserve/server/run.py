"""`recserve serve`: uvicorn, with a drain between the signal and the end."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import replace
from types import FrameType

import torch
import uvicorn
from fastapi import FastAPI

from recserve.config import ServerConfig
from recserve.server.app import create_app
from recserve.server.lifecycle import Lifecycle
from recserve.server.transport.connection import Connection, connection_class
from recserve.server.transport.connection_limits import ConnectionLimits, possible_connections

log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """On the first signal `ready` and new work get 503, what runs is finished, and it exits.

    A second signal ends the wait.
    """

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, delay_s: float) -> None:
        super().__init__(config)
        self.lifecycle = lifecycle
        self.delay_s = delay_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.lifecycle.draining:
            super().handle_exit(sig, frame)
            return
        log.info("%s: draining", signal.Signals(sig).name)
        self.lifecycle.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True: stop listening and wait for what is in flight."""
        if self.lifecycle.failure is not None:
            return True
        if self.lifecycle.draining:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.drain()
            self.delay_s -= 0.1
            if self.delay_s <= 0:
                return True
        return await super().on_tick(counter)


def show_log() -> None:
    """Our own messages on stderr, in the form of uvicorn's, unless someone has set that up."""
    ours = logging.getLogger("recserve")
    if not ours.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)-9s %(message)s"))
        ours.addHandler(handler)
        if ours.level == logging.NOTSET:
            ours.setLevel(logging.INFO)


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """Returns how uvicorn serves the app."""
    limits = ConnectionLimits.of(config)
    possible = possible_connections(limits.max_connections)
    if possible < limits.max_connections:
        log.warning("the limit on open files leaves room for %d connections", possible)
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_level="info",
        access_log=config.access_log,
        server_header=False,
        ws="none",
        http=connection_class(replace(limits, max_connections=possible), app.state.metrics),
        timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
    )


def serve(config: ServerConfig) -> int:
    """Serve until a signal comes. Returns the exit code: 1 if the bundle could not be served."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    show_log()
    app = create_app(config)
    lifecycle: Lifecycle = app.state.lifecycle
    settings = uvicorn_config(app, config)
    # uvloop where it is installed; plain asyncio.run would ignore that setting.
    with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
        runner.run(DrainingServer(settings, lifecycle, config.drain_delay_s).serve())
    return 1 if lifecycle.failure is not None else 0
