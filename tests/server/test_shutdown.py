"""A server that shuts down does not wait for requests that are not complete."""

import json
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from recserve.config import ServerConfig
from recserve.server.app import create_app
from recserve.server.run import DrainingServer, uvicorn_config
from tests.support.raw_http import all_of, connect
from tests.support.scripted_text import scripted

UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"


@contextmanager
def draining(folder, delay_s):
    """A server as `recserve serve` runs it, in a thread; SIGTERM sets `lifecycle.draining`."""
    drain = {"drain_delay_s": delay_s, "drain_timeout_s": 3600}
    config = ServerConfig(llm="given", port=0, allowed_hosts=("x",), **drain)
    app = create_app(config, scripted(folder, lambda prompt, seed: "yes"))
    settings = uvicorn_config(app, config)
    server = DrainingServer(settings, app.state.lifecycle, config.drain_delay_s)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started or not app.state.lifecycle.loaded.is_set():
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=30) as client:
            yield client, app.state.lifecycle, thread, server
    finally:
        server.should_exit = True
        thread.join(30)


def assert_shutting_down(said):
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body) == {
        "error": {
            "message": "the server is shutting down",
            "type": "unavailable_error",
            "param": None,
            "code": "not_ready",
        }
    }


def test_an_unfinished_body_does_not_hold_a_shutdown(tmp_path):
    with draining(tmp_path, 0.2) as (client, lifecycle, thread, _), connect(client) as wire:
        wire.sendall(UNFINISHED)
        while not lifecycle.in_flight:
            time.sleep(0.01)
        lifecycle.draining = True
        assert_shutting_down(all_of(wire))
        thread.join(30)
        assert not thread.is_alive()


def test_an_unfinished_body_is_refused_as_soon_as_the_server_drains(tmp_path):
    """Long before the server stops listening, which probes are given time to see."""
    with draining(tmp_path, 600) as (client, lifecycle, _, server), connect(client) as wire:
        wire.sendall(UNFINISHED)
        while not lifecycle.in_flight:
            time.sleep(0.01)
        lifecycle.draining = True
        assert_shutting_down(all_of(wire))
        assert client.get("/health/live").status_code == 200
        assert client.get("/health").status_code == 503
        server.delay_s = 0.0


@pytest.mark.parametrize("sent", [b"", b"GET /health/live HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_complete_head_does_not_hold_a_shutdown(tmp_path, sent):
    with draining(tmp_path, 0.2) as (client, lifecycle, thread, _), connect(client) as wire:
        wire.sendall(sent)
        lifecycle.draining = True
        assert all_of(wire) == b""
        thread.join(30)
        assert not thread.is_alive()
