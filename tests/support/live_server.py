"""A real server: uvicorn on a free local port, in a thread."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import uvicorn

from recserve.config import ServerConfig
from recserve.server import lifecycle
from recserve.server.app import create_app
from recserve.server.transport.connection import connection_class
from recserve.server.transport.connection_limits import ConnectionLimits
from recserve.service import Service, replacement
from recserve.service.errors import UnknownModel

# A full garbage collection takes seconds in a process with thousands of tests: none at the start or
# when a replaced service closes, and what tests/conftest.py froze stays frozen.
COLLECTOR = SimpleNamespace(
    collect=lambda: 0,
    freeze=lambda: None,
    unfreeze=lambda: None,
    enable=gc.enable,
    disable=gc.disable,
)


@contextmanager
def live(service: Service, **settings: Any) -> Iterator[httpx.Client]:
    """Yields a client of a running server; the service closes with it.

    Requests written by hand may call the server `x`.
    """
    counts = tempfile.TemporaryDirectory()  # not next to the shared bundle
    settings = {"allowed_hosts": ("x",), "experiments_dir": counts.name, **settings}
    try:
        named = {"bundle": service.bundle.root}
    except UnknownModel:
        named = {"llm": "given"}
    try:
        with run_server(ServerConfig(**named, **settings), service) as client:
            yield client
    finally:
        counts.cleanup()


@contextmanager
def run_server(config: ServerConfig, service: Service | None = None) -> Iterator[httpx.Client]:
    """Yields a client of a running server on a free port, once it is ready.

    Args:
        config: Settings of the server.
        service: Its service, which closes with it; None opens the one that `config` names.
    """
    app = create_app(config, service)
    http = connection_class(ConnectionLimits.of(config), app.state.metrics)
    server = uvicorn.Server(
        uvicorn.Config(app, http=http, port=0, log_level="warning", ws="none", server_header=False)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    with (
        mock.patch.object(lifecycle, "gc", COLLECTOR),
        mock.patch.object(replacement, "gc", COLLECTOR),
    ):
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        address = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(base_url=address, timeout=30, verify=False) as client:
                while client.get("/health/ready").status_code != 200:
                    if app.state.lifecycle.failure is not None:
                        raise app.state.lifecycle.failure
                    time.sleep(0.01)
                client.app = app
                yield client
        finally:
            server.should_exit = True
            thread.join()
