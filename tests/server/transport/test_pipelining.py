"""Pipelined requests are all answered, and only a bounded number of them is queued."""

import asyncio

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from recserve.metrics import Metrics
from recserve.server.transport.connection import SLICE_BYTES, Connection
from recserve.server.transport.connection_limits import ConnectionLimits
from tests.support.live_server import live
from tests.support.raw_http import Wire, connect
from tests.support.scripted_text import scripted
from tests.support.waiting import until

SMALLEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with live(scripted(tmp_path_factory.mktemp("toy"), lambda prompt, seed: "yes")) as running:
        yield running


def test_two_thousand_pipelined_requests_have_two_thousand_answers_in_order(server):
    one = b"GET /health/live HTTP/1.1\r\nHost: x\r\nX-Request-Id: n%d\r\n\r\n"
    with connect(server) as wire:
        wire.sendall(b"".join(one % n for n in range(2000)))
        said = b""
        while said.count(b'{"status":"live"}') < 2000:
            part = wire.recv(1 << 16)
            assert part
            said += part
    named = [line for line in said.split(b"\r\n") if line.startswith(b"x-request-id: ")]
    assert named == [b"x-request-id: n%d" % n for n in range(2000)]


def test_bodies_that_come_in_pieces_are_put_together_on_one_connection(server):
    body = b'{"model": "toy", "prompt": "%s", "max_tokens": 4}' % (b"a" * 100)

    def pieces():
        for start in range(0, len(body), 10):
            yield body[start : start + 10]

    with httpx.Client(base_url=server.base_url, timeout=30) as client:
        for content in (body, pieces(), body):
            answer = client.post("/v1/completions", content=content)
            assert answer.json()["choices"][0]["text"] == "yes"
            assert answer.json()["usage"]["prompt_tokens"] == 100


def test_a_client_that_leaves_cancels_the_request_that_is_answered(server):
    """Not only the last one that came."""
    lifecycle = server.app.state.lifecycle
    engine = lifecycle.service.engine
    num_cancelled = engine.cancelled
    body = b'{"model": "toy", "prompt": "a", "max_tokens": 4}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    engine.hold.set()
    try:
        with connect(server) as wire:
            wire.sendall(head + body + SMALLEST)
            until(lambda: lifecycle.in_flight == 1)
        until(lambda: lifecycle.in_flight == 0 and engine.cancelled == num_cancelled + 1)
    finally:
        engine.hold.clear()


async def greet(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_a_client_that_sends_faster_than_it_is_answered_is_not_read():
    """At most one read of the socket waits, and the requests of one slice are queued."""
    sent = SMALLEST * 3000

    async def run():
        config = uvicorn.Config(greet, log_config=None)
        metrics = Metrics((), (), lambda: None)
        limits = ConnectionLimits()
        connection = Connection(config, ServerState(), {}, limits=limits, metrics=metrics)
        wire = Wire()
        connection.connection_made(wire)
        num_reads = most_waiting = most_unread = 0
        while num_reads < 3 or connection.pipeline:
            if num_reads < 3 and not wire.paused:
                connection.data_received(sent)
                num_reads += 1
            most_waiting = max(most_waiting, len(connection.pipeline))
            most_unread = max(most_unread, len(connection._unread))
            await asyncio.sleep(0)
        while wire.written.count(b"HTTP/1.1 200 OK") < 9000:
            await asyncio.sleep(0)
        connection.connection_lost(None)
        return most_waiting, most_unread

    most_waiting, most_unread = asyncio.run(run())
    assert 0 < most_waiting <= SLICE_BYTES // len(SMALLEST) + 1
    assert 0 < most_unread <= len(sent)
