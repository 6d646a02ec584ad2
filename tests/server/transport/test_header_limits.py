"""URL, headers and trailers of a request are limited before the key is checked."""

import json

import pytest

from tests.support.live_server import live
from tests.support.raw_http import all_of, connect
from tests.support.scripted_text import scripted
from tests.support.waiting import until

LIMIT_BYTES, LIMIT_HEADERS = 64 << 10, 128
TOO_LONG = "URL and headers may have at most 65536 bytes, got more"
TOO_MANY = "a request may have at most 128 headers, got more"
START = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
BODY = json.dumps({"model": "toy", "prompt": "a", "max_tokens": 4}).encode()
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with live(scripted(tmp_path_factory.mktemp("toy"), lambda prompt, seed: "yes")) as running:
        yield running


@pytest.fixture
def wire(server):
    with connect(server) as opened:
        yield opened


def status_and_body(said):
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def assert_refused(said, message):
    status, body = status_and_body(said)
    assert status == 431
    assert json.loads(body) == {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": "headers_too_large",
        }
    }
    head = said.partition(b"\r\n\r\n")[0].lower()
    assert b"\r\nx-request-id: " in head and b"\r\nconnection: close" in head
    assert b"\r\ncontent-length: %d" % len(body) in head


def padded(num_bytes):
    """A request whose URL and headers, as they are counted, have so many bytes."""
    counted = len("/health/live") + len("Host: x\r\n") + len("Connection: close\r\n")
    value = b"a" * (num_bytes - counted - len("A: \r\n"))
    return START + b"Connection: close\r\nA: " + value + b"\r\n\r\n"


def test_headers_of_64_kib_are_answered(wire):
    wire.sendall(padded(LIMIT_BYTES))
    assert status_and_body(all_of(wire)) == (200, b'{"status":"live"}')


COMPLETE = b"Connection: close\r\n"
MANY = b"".join(b"A%d: b\r\n" % n for n in range(200))
LONG = b"a" * (LIMIT_BYTES + 8192)
TOO_LARGE = {
    "one byte": (padded(LIMIT_BYTES + 1), TOO_LONG),
    "far too long": (padded(LIMIT_BYTES + 100_000), TOO_LONG),
    "one header": (START + COMPLETE + MANY.partition(b"A127")[0] + b"\r\n", TOO_MANY),
    "an endless url": (b"GET /" + LONG, TOO_LONG),
    "an endless value": (START + b"A: " + LONG, TOO_LONG),
    "an endless name": (START + LONG, TOO_LONG),
    "endless spaces": (START + b"A:" + b" " * len(LONG), TOO_LONG),
    "an endless first name": (b"GET /health/live HTTP/1.1\r\n" + LONG, TOO_LONG),
    "endless lines": (START + MANY, TOO_MANY),
    "many trailers": (CHUNKED + CHUNK + b"0\r\n" + MANY, TOO_MANY),
    "a long trailer": (CHUNKED + CHUNK + b"0\r\nA: " + LONG, TOO_LONG),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_431_although_it_may_never_end(server, wire, name):
    sent, message = TOO_LARGE[name]
    wire.sendall(sent)
    assert_refused(all_of(wire), message)
    until(lambda: not server.app.state.lifecycle.in_flight)


def test_128_headers_are_answered(wire):
    wire.sendall(START + COMPLETE + MANY.partition(b"A126")[0] + b"\r\n")
    assert status_and_body(all_of(wire)) == (200, b'{"status":"live"}')


def test_trailers_are_not_read_as_headers(wire):
    wire.sendall(CHUNKED + CHUNK + b"0\r\nX-Deadline-Ms: never\r\n\r\n")
    assert status_and_body(all_of(wire))[0] == 200


def test_refusals_are_counted(server, wire):
    def counted():
        page = server.get("/metrics").text
        marked = 'recserve_requests_failed_total{reason="invalid"} '
        (line,) = [line for line in page.splitlines() if line.startswith(marked)]
        return float(line.removeprefix(marked))

    before = counted()
    wire.sendall(padded(LIMIT_BYTES + 1))
    all_of(wire)
    assert counted() == before + 1


def test_a_refusal_waits_for_the_answer_before_it(server, wire):
    engine = server.app.state.lifecycle.service.engine
    engine.hold.set()
    try:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)
        wire.sendall(head + BODY + padded(LIMIT_BYTES + 1))
        wire.settimeout(0.2)
        with pytest.raises(TimeoutError):
            wire.recv(1)
    finally:
        engine.hold.clear()
    wire.settimeout(20)
    said = all_of(wire)
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert_refused(said[said.index(b"HTTP/1.1 431") :], TOO_LONG)
