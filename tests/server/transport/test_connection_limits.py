"""The number of connections is limited; a further client gets 503 and is closed."""

import json

import pytest

from recserve.server.transport import connection_limits
from tests.support.live_server import live
from tests.support.raw_http import all_of, connect, one_of
from tests.support.scripted_text import scripted
from tests.support.waiting import until

BODY = json.dumps({"model": "toy", "prompt": "a", "max_tokens": 4}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)
GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture
def client(tmp_path):
    served = scripted(tmp_path, lambda prompt, seed: "yes, and no")
    with live(served, max_connections=3, header_timeout_s=3600) as running:
        yield running


def is_answered(client):
    with connect(client) as wire:
        try:
            wire.sendall(GET)
            return all_of(wire).startswith(b"HTTP/1.1 200 ")
        except OSError:  # refused before the request was read
            return False


@pytest.fixture
def stalled(client):
    """Two connections whose texts are not written before the test ends."""
    lifecycle = client.app.state.lifecycle
    client.close()
    until(lambda: is_answered(client))
    lifecycle.service.engine.hold.set()
    with connect(client) as first, connect(client) as second:
        for wire in (first, second):
            wire.sendall(POST + BODY)
        try:
            until(lambda: lifecycle.in_flight == 2)
            yield first, second
        finally:
            lifecycle.service.engine.hold.clear()


def test_a_connection_above_the_limit_gets_503_and_the_others_go_on(client, stalled):
    with connect(client), connect(client) as refused:  # the third says nothing
        head, _, body = all_of(refused).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in head.lower()
    assert json.loads(body)["error"] == {
        "message": "the server has reached its limit of connections",
        "type": "overloaded_error",
        "param": None,
        "code": "too_many_connections",
    }
    failed = client.app.state.metrics.failed.labels("too_many_connections")
    assert failed._value.get() >= 1
    client.app.state.lifecycle.service.engine.hold.clear()
    for wire in stalled:
        assert one_of(wire)[0].startswith(b"HTTP/1.1 200 ")
        wire.close()
    until(lambda: is_answered(client))


@pytest.mark.parametrize(
    "soft, hard, wanted, raised, possible",
    [
        (1024, 524288, 4096, 4352, 4096),
        (1024, 1024, 4096, 1024, 768),
        (1024, -1, 4096, 4352, 4096),
        (-1, -1, 4096, -1, 4096),
        (65536, 65536, 4096, 65536, 4096),
        (100, 100, 4096, 100, 1),
    ],
)
def test_the_limit_on_open_files_bounds_the_connections(
    monkeypatch, soft, hard, wanted, raised, possible
):
    import resource

    limits = {"now": (soft, hard)}
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.update(now=pair))
    assert connection_limits.possible_connections(wanted) == possible
    assert limits["now"] == (raised, hard)


def test_a_system_that_refuses_more_open_files_bounds_the_connections(monkeypatch):
    import resource

    def refuse(*_):
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert connection_limits.possible_connections(4096) == 768
