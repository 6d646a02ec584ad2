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


@pytest.mark.parametrize("num_bytes", [LIMIT_BYTES + 1, LIMIT_BYTES + 100_000])
def test_longer_headers_are_431(wire, num_bytes):
    wire.sendall(padded(num_bytes))
    assert_refused(all_of(wire), TOO_LONG)


@pytest.mark.parametrize("num_headers, status", [(LIMIT_HEADERS, 200), (LIMIT_HEADERS + 1, 431)])
def test_a_request_may_have_128_headers(wire, num_headers, status):
    others = b"".join(b"A%d: b\r\n" % n for n in range(num_headers - 2))
    wire.sendall(START + b"Connection: close\r\n" + others + b"\r\n")
    said = all_of(wire)
    if status == 431:
        assert_refused(said, TOO_MANY)
    else:
        assert status_and_body(said) == (200, b'{"status":"live"}')


@pytest.mark.parametrize(
    "beginning",
    [b"GET /", START + b"A: ", START, START + b"A:", b"GET /health/live HTTP/1.1\r\n"],
    ids=["url", "value", "name", "space before a value", "first header"],
)
def test_what_never_ends_is_cut_at_64_kib(wire, beginning):
    """The server answers although the request is not complete and never will be."""
    filling = b" " if beginning.endswith(b":") else b"a"
    wire.sendall(beginning + filling * (LIMIT_BYTES + 8192))
    assert_refused(all_of(wire), TOO_LONG)


def test_header_lines_that_never_end_are_cut_at_128(wire):
    wire.sendall(START + b"".join(b"A%d: b\r\n" % n for n in range(200)))
    assert_refused(all_of(wire), TOO_MANY)


@pytest.mark.parametrize(
    "trailers, message",
    [
        (b"".join(b"A%d: b\r\n" % n for n in range(200)), TOO_MANY),
        (b"A: " + b"a" * (LIMIT_BYTES + 8192), TOO_LONG),
    ],
    ids=["many", "long"],
)
def test_trailers_count_as_headers(server, wire, trailers, message):
    wire.sendall(CHUNKED + CHUNK + b"0\r\n" + trailers)
    assert_refused(all_of(wire), message)
    until(lambda: not server.app.state.lifecycle.in_flight)


def test_trailers_are_not_read_as_headers(wire):
    wire.sendall(CHUNKED + CHUNK + b"0\r\nX-Deadline-Ms: never\r\n\r\n")
    assert status_and_body(all_of(wire))[0] == 200


def test_what_is_not_http_is_400_in_the_one_error_shape(wire):
    wire.sendall(b"GET /health/live HTTP/1.1\r\nHost : x\r\n\r\n")
    status, body = status_and_body(all_of(wire))
    assert status == 400
    assert json.loads(body)["error"] == {
        "message": "the request is not valid HTTP",
        "type": "invalid_request_error",
        "param": None,
        "code": "malformed_request",
    }


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
