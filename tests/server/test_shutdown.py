"""A server that shuts down does not wait for requests that are not complete."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from recserve.config import ServerConfig
from recserve.server.app import create_app
from recserve.server.run import DrainingServer, uvicorn_config
from recserve.server.transport import connection
from tests.support.raw_http import all_of, connect
from tests.support.scripted_text import scripted

LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
ASKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 32\r\n\r\n"
ASKED += b'{"model": "toy", "prompt": "hi"}'
UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"


@contextmanager
def draining(folder, delay_s, kind=DrainingServer):
    """A server as `recserve serve` runs it, in a thread; SIGTERM sets `lifecycle.draining`."""
    drain = {"drain_delay_s": delay_s, "drain_timeout_s": 3600}
    config = ServerConfig(llm="given", port=0, allowed_hosts=("x",), **drain)
    app = create_app(config, scripted(folder, lambda prompt, seed: "yes"))
    settings = uvicorn_config(app, config)
    server = kind(settings, app.state.lifecycle, config.drain_delay_s)
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


def test_responses_of_a_draining_server_announce_the_end_of_the_connection(tmp_path):
    with draining(tmp_path, 600) as (client, lifecycle, _, server):
        assert "connection" not in client.get("/health/live").headers
        lifecycle.draining = True
        for path, status in (("/health/live", 200), ("/health", 503), ("/nothing", 404)):
            answer = client.get(path)
            assert (answer.status_code, answer.headers["connection"]) == (status, "close")
        server.delay_s = 0.0


def test_pipelined_requests_are_answered_before_the_connection_ends(tmp_path):
    with draining(tmp_path, 600) as (client, lifecycle, _, server), connect(client) as wire:
        lifecycle.draining = True
        wire.sendall(LIVE * 20)
        said = all_of(wire)
        assert said.count(b"HTTP/1.1 200 ") == 20 and said.count(b"connection: close") == 1
        server.delay_s = 0.0


def test_a_request_without_its_body_does_not_end_the_connection(tmp_path):
    """A client that still sends its body would be reset."""
    with draining(tmp_path, 600) as (client, lifecycle, _, server), connect(client) as wire:
        lifecycle.draining = True
        wire.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        said = b""
        while b'"error"' not in said:
            said += wire.recv(1 << 16)
        assert said.startswith(b"HTTP/1.1 404 ") and b"connection: close" not in said
        wire.sendall(b"{}" + LIVE)
        assert all_of(wire)
        server.delay_s = 0.0


def test_a_kept_connection_is_answered_after_the_port_has_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "END_S", 60)
    with draining(tmp_path, 0.0) as (client, lifecycle, thread, server), connect(client) as wire:
        wire.sendall(LIVE)
        assert wire.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        lifecycle.draining = True
        while server.servers[0].sockets:
            time.sleep(0.01)
        wire.sendall(ASKED)
        assert_shutting_down(all_of(wire))
        thread.join(30)
        assert not thread.is_alive()


def test_a_connection_that_nobody_has_accepted_is_answered(tmp_path, monkeypatch):
    """It arrives in the kernel in the turn of the event loop in which the server ends.

    A machine that pauses at each connection needs longer than a handshake to accept them all.
    """
    waiting = []
    made = connection.Connection.connection_made

    def pause(self, transport):
        time.sleep(0.01)
        made(self, transport)

    monkeypatch.setattr(connection.Connection, "connection_made", pause)

    class Late(DrainingServer):
        async def on_tick(self, counter):
            ends = await super().on_tick(counter)
            if ends:
                address = self.servers[0].sockets[0].getsockname()
                for _ in range(50):
                    waiting.append(socket.create_connection(address, 30))
                    waiting[-1].sendall(ASKED)
            return ends

    with draining(tmp_path, 0.0, Late) as (_, lifecycle, thread, _):
        lifecycle.draining = True
        thread.join(30)
        assert not thread.is_alive() and len(waiting) == 50
        for wire in waiting:
            with wire:
                assert_shutting_down(all_of(wire))


def test_a_client_that_goes_on_sending_a_refused_body_is_not_reset(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "LINGER_S", 60)
    with draining(tmp_path, 600) as (client, lifecycle, _, server), connect(client) as wire:
        wire.sendall(UNFINISHED)
        lifecycle.draining = True
        wire.recv(1, socket.MSG_PEEK)
        for _ in range(3):
            wire.sendall(b" " * 300)
        assert_shutting_down(all_of(wire))
        server.delay_s = 0.0
