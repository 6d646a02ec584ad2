"""HTTP/1.0 gets no chunks and no interim response; HTTP/1.1 needs exactly one `Host`."""

import json
import random

import pytest

from tests.support.live_server import live
from tests.support.raw_http import all_of, connect
from tests.support.scripted_text import scripted

STREAM = json.dumps({"model": "toy", "prompt": "hi", "stream": True}).encode()
TEXT = json.dumps({"model": "toy", "prompt": "hi"}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    served = scripted(tmp_path_factory.mktemp("toy"), lambda prompt, seed: "yes, of course")
    with live(served) as running:
        yield running


def ask(server, start: bytes, *headers: bytes, body: bytes = b"") -> tuple[bytes, bytes]:
    """Head and body of the answer to a request that closes its connection."""
    if body:
        headers = (*headers, b"Content-Length: %d" % len(body))
    with connect(server) as wire:
        wire.sendall(b"\r\n".join([start, *headers, b"Connection: close", b"", body]))
        head, _, rest = all_of(wire).partition(b"\r\n\r\n")
    return head.lower(), rest


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions"])
def test_a_stream_to_http_1_0_ends_with_its_connection(server, path):
    body = json.loads(STREAM)
    if b"chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    encoded = json.dumps(body).encode()
    for headers in ((), (b"Host: x",), (b"Connection: keep-alive",), (b"Expect: 100-continue",)):
        head, rest = ask(server, b"POST %s HTTP/1.0" % path, *headers, body=encoded)
        assert head.startswith(b"http/1.1 200") and b"transfer-encoding" not in head
        assert b"connection: close" in head and b"100 continue" not in head
        events = rest.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(json.loads(event.removeprefix("data: "))["id"] for event in events[:-2])


def test_http_1_1_still_gets_chunks(server):
    head, rest = ask(server, b"POST /v1/completions HTTP/1.1", b"Host: x", body=STREAM)
    assert b"transfer-encoding: chunked" in head and rest.endswith(b"\r\n0\r\n\r\n")


def test_answers_of_known_length_are_the_same_for_http_1_0(server):
    for method, path in ((b"GET", b"/health/live"), (b"HEAD", b"/metrics"), (b"GET", b"/nothing")):
        head, rest = ask(server, b"%s %s HTTP/1.0" % (method, path))
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        assert len(rest) == (0 if method == b"HEAD" else length)
    head, rest = ask(server, b"POST /v1/completions HTTP/1.0", body=TEXT)
    assert head.startswith(b"http/1.1 200") and json.loads(rest)["choices"]


SPELLINGS = (b"Host", b"host", b"HOST", b"hOsT")
OTHERS = (b"Accept: */*", b"X-Host: y", b"User-Agent: z", b"Upgrade: h2c", b"Forwarded: host=x")


def test_http_1_1_needs_exactly_one_host(server):
    """Spelling, place, other headers and versions are drawn; equal hosts are two hosts as well."""
    rng = random.Random(11)
    for turn in range(60):
        num_hosts, version = turn % 4, rng.choice((b"1.0", b"1.1", b"1.1"))
        headers = [rng.choice(SPELLINGS) + b": x" for _ in range(num_hosts)]
        headers += rng.sample(OTHERS, rng.randrange(3))
        rng.shuffle(headers)
        method, body = rng.choice(((b"GET", b""), (b"POST", TEXT)))
        path = b"/health/live" if method == b"GET" else b"/v1/completions"
        start = b"%s %s HTTP/%s" % (method, path, version)
        head, rest = ask(server, start, *headers, body=body)
        fine = num_hosts == 1 or (num_hosts == 0 and version == b"1.0")
        assert head.startswith(b"http/1.1 200" if fine else b"http/1.1 400"), (start, headers)
        if not fine:
            error = json.loads(rest)["error"]
            assert error["code"] == "malformed_request"
            assert error["message"].startswith("expected one header Host, got ")


def test_a_request_without_a_host_ends_its_connection(server):
    """What follows could be the body that a proxy saw."""
    with connect(server) as wire:
        wire.sendall(
            b"GET /health/live HTTP/1.1\r\n\r\nGET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        said = all_of(wire)
    assert said.count(b"HTTP/1.1 ") == 1 and said.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("path, kind", [(b"/v2/models/rank/infer", str), (b"/v1/rank", dict)])
def test_refusals_before_the_application_have_the_form_of_their_path(server, path, kind):
    for rest in (b"", b"Host: x\r\nbad header\r\n", b"Host: x\r\nA: " + b"a" * 70_000 + b"\r\n"):
        with connect(server) as wire:
            wire.sendall(b"POST %s?a=1 HTTP/1.1\r\n" % path + rest + b"\r\n")
            head, _, body = all_of(wire).partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
        assert isinstance(json.loads(body)["error"], kind)
