"""A request that does not arrive in time gets 408; a connection without a request is closed."""

import asyncio
import json
import select
import time

import pytest
import uvicorn
from uvicorn.server import ServerState

from recserve.metrics import Metrics
from recserve.server.transport.connection import Connection
from recserve.server.transport.connection_limits import ConnectionLimits
from tests.support.live_server import live
from tests.support.raw_http import Wire, all_of, connect, one_of
from tests.support.scripted_text import scripted

HEADER_TIMEOUT_S, BODY_TIMEOUT_S = 1.0, 1.5
GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\nContent-Length: 1000\r\n"
BODY = json.dumps({"model": "toy", "prompt": "a", "max_tokens": 4}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    served = scripted(tmp_path_factory.mktemp("toy"), lambda prompt, seed: "yes, and no")
    limits = {"header_timeout_s": HEADER_TIMEOUT_S, "body_timeout_s": BODY_TIMEOUT_S}
    with live(served, **limits) as running:
        yield running


@pytest.fixture
def wire(server):
    with connect(server) as opened:
        yield opened


def assert_timeout(said, message):
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close" in head.lower()
    assert json.loads(body) == {
        "error": {
            "message": message,
            "type": "timeout_error",
            "param": None,
            "code": "request_timeout",
        }
    }


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"\r\n\r\n"])
def test_a_connection_that_begins_no_request_is_closed_without_an_answer(wire, sent):
    wire.sendall(sent)
    assert all_of(wire) == b""


def drip(wire, byte):
    """Sends a byte ten times a second until the server answers or closes."""
    end = time.monotonic() + 30
    while not select.select([wire], [], [], 0.1)[0]:
        assert time.monotonic() < end, "no answer came"
        wire.sendall(byte)
    return all_of(wire)


@pytest.mark.parametrize("byte", [b"", b"a"], ids=["silent", "dripping"])
def test_headers_that_are_not_complete_in_time_are_408(wire, byte):
    wire.sendall(GET + b"A: ")
    said = drip(wire, byte)
    assert_timeout(said, "the headers did not arrive within 1 s")


@pytest.mark.parametrize("byte", [b"", b" "], ids=["silent", "dripping"])
def test_a_body_that_is_not_complete_in_time_is_408(server, wire, byte):
    wire.sendall(POST + b"\r\n{")
    said = drip(wire, byte)
    assert_timeout(said, "the body did not arrive within 1.5 s")
    assert b"\r\nx-request-id: mine" in said
    page = server.get("/metrics").text
    assert 'recserve_requests_failed_total{reason="request_timeout"} ' in page


def test_a_body_that_nobody_reads_may_not_take_longer_either(wire):
    """The answer comes at once; the connection is closed when the rest of the body is late."""
    wire.sendall(POST.replace(b"/v1/completions", b"/v1/nothing") + b"\r\n{")
    head, body = one_of(wire)
    assert head.startswith(b"HTTP/1.1 404 ")
    assert drip(wire, b" ") == b""


def test_a_connection_stays_open_between_requests(wire):
    """The timers are of one request each, and none of them runs between two."""
    for _ in range(2):
        wire.sendall(GET + b"\r\n")
        assert one_of(wire)[0].startswith(b"HTTP/1.1 200 ")
        time.sleep(HEADER_TIMEOUT_S + 0.3)
    wire.sendall(GET + b"Connection: close\r\n\r\n")
    assert all_of(wire).startswith(b"HTTP/1.1 200 ")


def test_a_request_behind_a_long_answer_has_its_time_after_it(server, wire):
    """Half a request waits behind a text that takes longer than headers may."""
    engine = server.app.state.lifecycle.service.engine
    engine.hold.set()
    try:
        post = POST.replace(b"1000", b"%d" % len(BODY)) + b"\r\n"
        wire.sendall(post + BODY + GET)
        time.sleep(HEADER_TIMEOUT_S + 0.5)
    finally:
        engine.hold.clear()
    head, body = one_of(wire)
    assert head.startswith(b"HTTP/1.1 200 ") and b'"text":"yes,"' in body
    assert_timeout(all_of(wire), "the headers did not arrive within 1 s")


class CountingLoop:
    """The running loop; remembers the timers that were asked of it."""

    def __init__(self):
        self.timers = []

    def call_later(self, *arguments):
        self.timers.append(asyncio.get_running_loop().call_later(*arguments))
        return self.timers[-1]

    def create_task(self, coroutine):
        return asyncio.get_running_loop().create_task(coroutine)


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [GET],
        [GET + b"\r\n"],
        [POST + b"\r\n{"],
        [GET, b"\r\n" + GET + b"\r\n" + GET, b"\r\n" + POST + b"\r\n", b"{"],
        [POST + b"Transfer-Encoding: chunked\r\n\r\n"],
        [b"nonsense\r\n\r\n"],
    ],
)
def test_a_connection_that_is_gone_leaves_no_timer_behind(pieces):
    async def read(scope, receive, send):
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.request":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def run():
        config = uvicorn.Config(read, log_config=None)
        metrics = Metrics((), (), lambda: None)
        loop = CountingLoop()
        connection = Connection(
            config, ServerState(), {}, loop, limits=ConnectionLimits(), metrics=metrics
        )
        connection.connection_made(Wire())
        for piece in [b"", *pieces]:
            if piece:
                connection.data_received(piece)
            for _ in range(10):
                await asyncio.sleep(0)
                assert sum(not timer.cancelled() for timer in loop.timers) <= 1
        assert loop.timers
        connection.connection_lost(None)
        for _ in range(10):
            await asyncio.sleep(0)
        assert all(timer.cancelled() for timer in loop.timers)

    asyncio.run(run())
