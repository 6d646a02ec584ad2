"""Runs the HTTP server: uvicorn, which drains between a signal and its exit."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import torch
import uvicorn
from fastapi import FastAPI

from recserve.config import ServerConfig
from recserve.server.app import create_app
from recserve.server.lifecycle import Lifecycle
from recserve.server.telemetry.logs import show_log
from recserve.server.transport.connection import Connection, connection_class
from recserve.server.transport.connection_limits import ConnectionLimits, possible_connections
from recserve.server.transport.listener import drop_handshakes

log = logging.getLogger(__name__)


# Time for a server to close engine and stores, after its requests have ended.
CLOSE_S = 5.0
# Time for handshakes that began before the server stopped listening.
HANDSHAKE_S = 0.2
# Time between two looks at the listening sockets, in which the event loop accepts.
LOOK_S = 0.01


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on a signal.

    After the first signal, `ready` and new requests get 503, running requests finish, and then the
    server exits. Responses announce the end of their connections. When the server stops
    listening, it first accepts the connections that wait in the kernel, and answers what arrives on
    open ones for a moment. A second signal ends the wait. The process ends within `drain_delay_s`,
    `drain_timeout_s` and CLOSE_S of the first signal, whatever clients, engine and stores do. A
    server that ends without a signal closes within `drain_timeout_s` and CLOSE_S.

    A server that still loads has no request to finish: its process ends at once, with status 0.
    A server that loads another bundle finishes its requests and does not wait for the bundle.
    A server whose engine has stopped ends with status 1, so that it is started again.

    Attributes:
        lifecycle: State of the service.
        delay_s: Time left until the server stops listening.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        lifecycle: Lifecycle,
        delay_s: float,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """Serves nothing yet.

        Args:
            config: Settings of uvicorn.
            lifecycle: State of the service.
            delay_s: Time between the first signal and the end of listening.
            end: Ends the process with a status, without waiting for other threads.
        """
        super().__init__(config)
        self.lifecycle = lifecycle
        self.delay_s = delay_s
        self._end = end

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal: the first one starts the drain, the second one ends it.

        While the server loads, the first one ends the process.
        """
        if not self.lifecycle.loaded.is_set():
            log.info("%s while loading: the process ends", signal.Signals(sig).name)
            # The thread that loads cannot be stopped, and waiting for it may take minutes.
            os._exit(0)
        if self.lifecycle.draining:
            super().handle_exit(sig, frame)
            return
        log.info("%s: draining", signal.Signals(sig).name)
        self.lifecycle.draining = True
        self._end_in_time()

    async def on_tick(self, counter: int) -> bool:
        """Runs ten times a second; True stops listening and waits for running requests."""
        if self.lifecycle.failure is not None:
            return True
        if self.lifecycle.engine_stopped:
            log.critical("the engine has stopped; the process ends so that it is started again")
            return True
        if self.lifecycle.draining:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.drain()
            self.delay_s -= 0.1
            if self.delay_s <= 0:
                return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts the last connections, stops listening, and waits for running requests."""
        if not self.lifecycle.draining:  # no signal has come
            self._end_in_time()
        await self._accept_last()
        await super().shutdown(sockets)

    def _end_in_time(self) -> None:
        timeout_s = self.config.timeout_graceful_shutdown or 0
        end_process_in(max(0.0, self.delay_s) + timeout_s + CLOSE_S, self._end)

    async def _accept_last(self) -> None:
        """Waits until the kernel holds no connection to accept, for the drain timeout at most.

        The event loop accepts: uvloop one connection in each turn, so a busy machine needs a while.
        """
        unaccepted = select.poll()
        for server in self.servers:
            for listener in server.sockets:
                drop_handshakes(listener)
                unaccepted.register(listener.fileno(), select.POLLIN)
        end_s = time.monotonic() + (self.config.timeout_graceful_shutdown or 0)
        await asyncio.sleep(HANDSHAKE_S)
        while unaccepted.poll(0) and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(LOOK_S)  # what was accepted last becomes a connection


def end_process_in(seconds: float, end: Callable[[int], object]) -> None:
    """Ends the process after some time, unless it has ended by itself.

    Args:
        seconds: The time.
        end: Ends the process with a status, without waiting for other threads.
    """

    def late() -> None:
        log.critical("not closed within %.1f s; the process ends now", seconds)
        end(1)

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """Returns the uvicorn configuration of the application."""
    limits = ConnectionLimits.of(config)
    possible = possible_connections(limits.max_connections)
    if possible < limits.max_connections:
        log.warning("the limit on open files allows only %d connections", possible)
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_level="info",
        # The middleware logs requests: uvicorn's line has user ids of paths and no request id.
        access_log=False,
        log_config=None,
        server_header=False,
        ws="none",
        # Only these proxies say who the client is. Without any, nobody does.
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=list(config.trusted_proxies),
        http=connection_class(replace(limits, max_connections=possible), app.state.metrics),
        timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
    )


def reload(lifecycle: Lifecycle) -> None:
    """Starts a thread that loads the configured bundle again if it has changed."""
    threading.Thread(target=lifecycle.reload, name="reload", daemon=True).start()


def serve(config: ServerConfig) -> int:
    """Serves until a signal arrives. SIGHUP loads the configured bundle again if it has changed.

    Args:
        config: Settings of the server.

    Returns:
        The exit status: 1 if the service could not be loaded or its engine has stopped, else 0.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    show_log(config.log_format)
    app = create_app(config)
    lifecycle: Lifecycle = app.state.lifecycle
    settings = uvicorn_config(app, config)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: reload(lifecycle))
    # Uses uvloop if it is installed; plain asyncio.run would ignore that setting.
    with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
        runner.run(DrainingServer(settings, lifecycle, config.drain_delay_s).serve())
    status = 1 if lifecycle.failure is not None or lifecycle.engine_stopped else 0
    if lifecycle.swapping:
        log.info("a bundle was being loaded: the process ends without it")
        # Its thread cannot be stopped, and Python would end with native code running.
        os._exit(status)
    return status
