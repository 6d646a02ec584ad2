"""Flow control of a connection: bytes that wait for the parser, and unread responses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


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
