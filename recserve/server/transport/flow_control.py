"""Flow control of a connection: waiting bytes, unread responses, responses without chunks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


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
