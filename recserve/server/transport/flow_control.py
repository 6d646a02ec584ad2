"""Flow control of a connection: waiting bytes, unread responses, responses without chunks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MAX_UNSENT_BYTES = 128 << 10  # that the system holds of one connection before it sends them


class HoldableFlow(FlowControl):
    """Flow control that stays paused while earlier bytes wait for the parser."""

    _held = False

    def resume_reading(self) -> None:
        """Resumes reading, unless bytes wait for the parser."""
        if not self._held:
            super().resume_reading()

    def hold(self, held: bool, resume: bool) -> None:
        """Pauses or resumes reading.

        Args:
            held: True if bytes wait for the parser. Reading then pauses until a call with False.
            resume: Resumes reading at once after such a pause. Otherwise reading resumes after the
                next response.
        """
        was_held, self._held = self._held, held
        if held:
            self.pause_reading()
        elif was_held and resume:
            self.resume_reading()


class OpenUntilRead(asyncio.Transport):
    """The transport of a response whose client still sends; its `close` leaves the reading side.

    Closing a socket with unread bytes resets it, and the client could lose the response.
    """

    def __init__(self, transport: asyncio.Transport, end_writing: Callable[[], None]) -> None:
        super().__init__()
        self._transport = transport
        self._end_writing = end_writing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Sends bytes."""
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Returns whether the connection is closing."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Ends the response; the connection closes it when the client has."""
        self._end_writing()


class SlowReader:
    """Ends a connection whose client reads its responses too slowly.

    Only the time counts in which bytes wait in this process and writing is paused: a response that
    the server itself makes slowly has none. In each `timeout_s` of that time, the client must read
    `timeout_s * least_bytes_s` bytes. It holds for every kind of response, and also for one that
    the application has already written.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        least_bytes_s: float,
    ) -> None:
        self._transport, self._loop = transport, loop
        self._timeout_s, self._least_bytes = timeout_s, timeout_s * least_bytes_s
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = 0.0  # of this pause
        self._size = 0  # bytes that waited when it began
        self._left_s = timeout_s
        self._num_read = 0  # bytes read in the pauses since the last check

    def pause(self) -> None:
        """Notes that so many bytes wait that writing is paused."""
        self.resume()
        self._began_s = self._loop.time()
        self._size = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._left_s, self._check)

    def resume(self) -> None:
        """Notes that writing goes on, or that the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left_s -= self._loop.time() - self._began_s
            self._num_read += self._size - self._transport.get_write_buffer_size()

    def _check(self) -> None:
        self.resume()
        if self._num_read < self._least_bytes:
            self._transport.abort()
            return
        self._left_s, self._num_read = self._timeout_s, 0
        self.pause()


def limit_unread_bytes(transport: asyncio.Transport) -> None:
    """Makes the system take no more bytes than it can soon send, so that the others are counted.

    By default it takes megabytes, and then none for a minute although the client reads.
    """
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    opened = transport.get_extra_info("socket")
    if option is None or opened is None or opened.family == getattr(socket, "AF_UNIX", None):
        return
    with contextlib.suppress(OSError):  # a system without the option counts more coarsely
        opened.setsockopt(socket.IPPROTO_TCP, option, MAX_UNSENT_BYTES)


def limit_unread_answer(transport: asyncio.Transport, timeout_s: float) -> None:
    """Makes the system close a connection whose client does not read its response.

    The limit also holds after the server has closed its side. Only Linux has this option; other
    systems have no limit.

    Args:
        transport: The connection.
        timeout_s: Time without progress after which the connection is closed.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    opened = transport.get_extra_info("socket")
    if option is None or opened is None or opened.family == getattr(socket, "AF_UNIX", None):
        return
    opened.setsockopt(socket.IPPROTO_TCP, option, round(timeout_s * 1e3))


def send_without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Returns the application for a client of HTTP/1.0, which cannot read chunks.

    A response of unknown length then ends with its connection.

    Args:
        app: The application.
        cycle: The request and its response. uvicorn closes the connection of HTTP/1.0 after it.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        unframed = False

        async def send_plain(message: Message) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                unframed = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if unframed:
                    cycle.chunked_encoding = False
            elif unframed:
                # uvicorn compares each part with the bytes that a Content-Length leaves.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return call
