"""The deadline bounds a whole exchange, and an answer has a size limit: both clients, real sockets.

A server drips its answer. Each drip arrives in time, and the whole answer would arrive after the
deadline, so a client without a bound on the whole would return it.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pytest

from recserve.client import (
    AnswerTooLarge,
    ApiError,
    AsyncClient,
    Client,
    ClientOptions,
    DeadlinePassed,
)
from recserve.client.attempts import MAX_DEADLINE_S, wait_asked_s
from recserve.schemas.events import EventInput, EventsRequest
from recserve.schemas.text import CompletionRequest
from tests.support.grids import covering
from tests.support.raw_server import raw_server, read_head

DRIP_S, DRIPS, DEADLINE_S = 0.02, 60, 0.3
OK = b"HTTP/1.1 200 OK\r\n"
EVENT = {
    **{"id": "1", "object": "text_completion", "created": 1, "model": "m"},
    **{"system_fingerprint": "f", "choices": []},
}


@dataclass(frozen=True)
class Way:
    """A client, and whether it reads a stream."""

    asynchronous: bool
    stream: bool

    def ask(self, url: str, **options: float) -> object:
        """Sends one request and returns the answer, or the list of the chunks."""
        body = CompletionRequest(prompt="x")

        async def run() -> object:
            async with AsyncClient(url, ClientOptions(**options)) as client:
                if self.stream:
                    return [chunk async for chunk in client.stream_completion(body)]
                return await client.version()

        if self.asynchronous:
            return asyncio.run(run())
        with Client(url, ClientOptions(**options)) as client:
            return list(client.stream_completion(body)) if self.stream else client.version()


PLAIN = [Way(False, False), Way(True, False)]
STREAMS = [Way(False, True), Way(True, True)]


def drip(wire: socket.socket, start: bytes, one: bytes, end: bytes) -> None:
    read_head(wire)
    wire.sendall(start)
    for _ in range(DRIPS):
        time.sleep(DRIP_S)
        wire.sendall(one)
    wire.sendall(end)


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
SIZED = b"Content-Length: %d\r\n\r\n" % (DRIPS + 2)
PACKER = zlib.compressobj(wbits=31)
GZIP_START = PACKER.flush(zlib.Z_SYNC_FLUSH)
EMPTY_BLOCK = b"\x00\x00\x00\xff\xff"
GZIP_END = PACKER.compress(b"{}") + PACKER.flush()
SHORT = b"Content-Length: 2\r\n\r\n{}"
DRIPPED = {
    "head": (OK + b"X-Slow: ", b"x", b"\r\n" + SHORT),
    "many_headers": (OK, b"X-Slow: x\r\n", SHORT),
    "before_the_head": (
        b"",
        b"HTTP/1.1 103 Early Hints\r\n\r\n",
        OK + SHORT,
    ),
    "sized": (OK + SIZED, b" ", b"{}"),
    "unsized": (OK + b"\r\n", b" ", b"{}"),
    "chunked": (CHUNKED, chunked(b" "), chunked(b"{}") + b"0\r\n\r\n"),
    "chunk_size": (CHUNKED + b"2;", b"x", b"\r\n{}\r\n0\r\n\r\n"),
    "trailers": (CHUNKED + chunked(b"{}") + b"0\r\n", b"X: x\r\n", b"\r\n"),
    "gzip": (OK + b"Content-Encoding: gzip\r\n\r\n" + GZIP_START, EMPTY_BLOCK, GZIP_END),
    "error": (b"HTTP/1.1 500 No\r\n" + SIZED, b" ", b"{}"),
    "refusal": (b"HTTP/1.1 503 No\r\nRetry-After: 0\r\n" + SIZED, b" ", b"{}"),
}
EVENTS = b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(EVENT).encode()
DRIPPED_EVENTS = {
    "comments": (OK + b"\r\n", b": x\n\n", EVENTS),
    "events": (OK + b"\r\n", b"data: %s\n\n" % json.dumps(EVENT).encode(), EVENTS),
    "line": (OK + b"\r\ndata: ", b" ", EVENTS.removeprefix(b"data: ")),
    "after_the_end": (OK + b"\r\n" + EVENTS, b"\n", b""),
}


@pytest.mark.parametrize("place,way", covering(tuple(DRIPPED), {str(way): way for way in PLAIN}))
def test_the_deadline_ends_a_dripping_answer(place, way):
    with raw_server(lambda wire: drip(wire, *DRIPPED[place])) as url, pytest.raises(DeadlinePassed):
        way.ask(url, deadline_s=DEADLINE_S)


@pytest.mark.parametrize(
    "place,way", covering(tuple(DRIPPED_EVENTS), {str(way): way for way in STREAMS})
)
def test_the_deadline_ends_a_dripping_stream(place, way):
    part = DRIPPED_EVENTS[place]
    with raw_server(lambda wire: drip(wire, *part)) as url, pytest.raises(DeadlinePassed):
        way.ask(url, text_deadline_s=DEADLINE_S)


@pytest.mark.parametrize("way", PLAIN, ids=str)
def test_all_attempts_share_the_deadline(way):
    refusal = b"HTTP/1.1 503 No\r\nRetry-After: 0\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    def serve(wire: socket.socket) -> None:
        read_head(wire)
        time.sleep(DEADLINE_S / 4)
        wire.sendall(refusal)

    with raw_server(serve) as url, pytest.raises((DeadlinePassed, ApiError)):
        way.ask(url, deadline_s=DEADLINE_S, retries=100)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_deadline_ends_a_body_that_is_read_slowly(asynchronous):
    events = [EventInput(user_id="u" * 200, item_id="x" * 200)] * 20_000

    def serve(wire: socket.socket) -> None:
        for _ in range(DRIPS):
            time.sleep(DRIP_S)
            wire.recv(1 << 14)
        while not (part := wire.recv(1 << 20)).endswith(b"}"):
            if not part:
                return
        counts = b'{"accepted":0,"duplicates":0,"corrected":0,"rejected":[]}'
        wire.sendall(OK + b"Content-Length: %d\r\n\r\n%s" % (len(counts), counts))

    async def run(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.add_events(EventsRequest(events=events), deadline_s=DEADLINE_S)

    with raw_server(serve) as url, pytest.raises(DeadlinePassed):
        if asynchronous:
            asyncio.run(run(url))
        else:
            with Client(url) as client:
                client.add_events(EventsRequest(events=events), deadline_s=DEADLINE_S)


LIMIT, LONG = 100_000, 16 << 20
ZEROS = b"0" * (1 << 20)


def pour(start: bytes, frame: Callable[[bytes], bytes]) -> Callable[[socket.socket], None]:
    """Returns a server of an answer far above the limit."""

    def serve(wire: socket.socket) -> None:
        read_head(wire)
        wire.sendall(start)
        for _ in range(LONG // len(ZEROS)):
            wire.sendall(frame(ZEROS))

    return serve


def bomb(encoding: bytes, packed: bytes) -> Callable[[socket.socket], None]:
    """Returns a server of a small answer that is large when it is decompressed."""
    head = b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (encoding, len(packed))

    def serve(wire: socket.socket) -> None:
        read_head(wire)
        wire.sendall(OK + head + packed)

    return serve


BOMB = b"0" * LONG
TOO_LARGE = {
    "unsized": pour(OK + b"\r\n", bytes),
    "sized": pour(OK + b"Content-Length: %d\r\n\r\n" % LONG, bytes),
    "chunked": pour(CHUNKED, chunked),
    "error": pour(b"HTTP/1.1 500 No\r\n\r\n", bytes),
    "gzip": bomb(b"gzip", gzip.compress(BOMB, mtime=0)),
    "x-gzip": bomb(b"x-gzip", gzip.compress(BOMB, mtime=0)),
    "deflate": bomb(b"deflate", zlib.compress(BOMB)),
}


@pytest.mark.parametrize("way", PLAIN + STREAMS, ids=str)
@pytest.mark.parametrize("kind", TOO_LARGE)
def test_a_larger_answer_is_an_error(kind, way):
    """In a stream, it is a line without an end."""
    refused = pytest.raises(AnswerTooLarge, match=f"more than {LIMIT} bytes")
    with raw_server(TOO_LARGE[kind]) as url, refused:
        way.ask(url, max_answer_bytes=LIMIT)


@pytest.mark.parametrize("way", PLAIN, ids=str)
@pytest.mark.parametrize("encoding", [b"br", b"zstd", b"gzip, gzip", b"\xb2"])
def test_an_encoding_that_was_not_asked_for_is_an_error(encoding, way):
    refused = pytest.raises(httpx.DecodingError, match="Content-Encoding is .*; expected gzip")
    with raw_server(bomb(encoding, b"{}")) as url, refused:
        way.ask(url)


@pytest.mark.parametrize("way", PLAIN + STREAMS, ids=str)
def test_compressed_answers_are_read(way):
    content = EVENTS * 3 if way.stream else json.dumps({"version": "1" * 200_000}).encode()
    with raw_server(bomb(b"gzip", gzip.compress(content, mtime=0))) as url:
        answer = way.ask(url)
    assert len(answer) == (3 if way.stream else 1)


@pytest.mark.parametrize("way", PLAIN, ids=str)
@pytest.mark.parametrize("tail", [b"x", gzip.compress(b"{}", mtime=0)])
def test_bytes_after_a_compressed_answer_are_an_error(tail, way):
    refused = pytest.raises(httpx.DecodingError, match="after the compressed answer")
    with raw_server(bomb(b"gzip", gzip.compress(b"{}", mtime=0) + tail)) as url, refused:
        way.ask(url)


@pytest.mark.parametrize("way", STREAMS, ids=str)
def test_a_long_stream_of_short_events_is_read(way):
    events = EVENTS * 40
    assert len(events) > 4000
    with raw_server(bomb(b"identity", events)) as url:
        assert len(way.ask(url, max_answer_bytes=4000)) == 40


@pytest.mark.parametrize("way", STREAMS, ids=str)
@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_an_event_ends_at_a_newline_only(mark, way):
    """A text may hold characters that Python's splitlines takes for the end of a line."""
    event = json.dumps(EVENT | {"model": f"a{mark}b"}, ensure_ascii=False)
    packed = f"data: {event}\r\n\r\n".replace("\x0b", "\\u000b").replace("\x1c", "\\u001c")
    with raw_server(bomb(b"identity", packed.encode())) as url:
        assert [chunk.model for chunk in way.ask(url)] == [f"a{mark}b"]


NUMBERS = ("-1", "+1", "1.5", "1e3", "nan", "inf", "-inf", "0x10", "1 2", "1_0")
WORDS = (*NUMBERS, "", " ", "soon", "\x00")
DATES = ("Sun, 06 Nov 1994 08:49:37 GMT", "Thu, 99 Foo 2050 25:61:61 GMT", "1 Jan 2020")
RETRY_VALUES = [
    *(("0", 0), ("7", 7), ("007", 7), ("9" * 400, math.inf), ("9" * 5000, math.inf)),
    *((word, 0) for word in (*"²³¹٣५𝟗①", *WORDS, *DATES, "é" * 99, "1 Jan 99999 0:0:0 GMT")),
]


@pytest.mark.parametrize(("value", "seconds"), RETRY_VALUES, ids=lambda v: ascii(v)[:20])
def test_any_retry_after_is_a_number_of_seconds(value, seconds):
    assert wait_asked_s(value) == seconds


def test_a_date_in_retry_after_is_waited_for():
    for zone in ("GMT", "-0000", "+0100"):
        assert wait_asked_s(f"Fri, 31 Dec 2100 23:59:59 {zone}") > 1e9


@pytest.mark.parametrize("way", PLAIN, ids=str)
@pytest.mark.parametrize(
    "value", ["²".encode("latin-1"), "²".encode(), "٣".encode(), b"-5", b"nan"]
)
def test_a_strange_retry_after_is_retried_at_once(value, way):
    answers = [
        b"HTTP/1.1 429 No\r\nRetry-After: " + value + b"\r\nContent-Length: 0\r\n\r\n",
        OK + SHORT,
    ]

    def serve(wire: socket.socket) -> None:
        for answer in answers:
            read_head(wire)
            wire.sendall(answer)

    with raw_server(serve) as url:
        assert way.ask(url) == {}


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e300, MAX_DEADLINE_S + 1])
def test_a_deadline_that_no_header_can_say_is_refused(seconds):
    with Client("http://s") as client, pytest.raises(ValueError, match="deadline_s is"):
        client.version(deadline_s=seconds)
    with pytest.raises(ValueError, match="text_deadline_s is"):
        ClientOptions(text_deadline_s=seconds)
