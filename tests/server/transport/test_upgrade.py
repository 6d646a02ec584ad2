"""`Upgrade` is ignored: there is HTTP/1.1 alone, and the request keeps its body."""

import json
import socket

import pytest

from tests.support.live_server import live
from tests.support.raw_http import all_of, connect
from tests.support.scripted_text import scripted

BODY = json.dumps({"model": "toy", "prompt": "a", "max_tokens": 4}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: same\r\n"
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)
LAST = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with live(scripted(tmp_path_factory.mktemp("toy"), lambda prompt, seed: "yes")) as running:
        yield running


@pytest.fixture
def wire(server):
    with connect(server) as opened:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield opened


@pytest.mark.parametrize("piece_bytes", [1, 100, len(HEAD), len(HEAD) + 5, 1 << 20])
def test_a_request_that_offers_h2c_is_answered_with_its_body(wire, piece_bytes):
    """As Java's HttpClient sends it, with a request behind it on the same connection."""
    sent = HEAD + BODY + LAST
    for start in range(0, len(sent), piece_bytes):
        wire.sendall(sent[start : start + piece_bytes])
    said = all_of(wire)
    assert said.count(b"HTTP/1.1 200 OK") == 2 and b"HTTP/1.1 4" not in said
    assert b'"text":"yes"' in said and b"x-request-id: same" in said
    assert said.endswith(b'{"status":"live"}')


def test_an_offer_of_websockets_is_an_ordinary_get(wire):
    wire.sendall(
        b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\n\r\n" + LAST
    )
    assert all_of(wire).count(b'{"status":"live"}') == 2


@pytest.mark.parametrize(
    "sent", [b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
)
def test_a_tunnel_and_http_2_are_refused(wire, sent):
    wire.sendall(sent)
    head, _, body = all_of(wire).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "malformed_request"
