"""Flow control of a connection: bytes that wait for the parser, and unread responses."""

from __future__ import annotations

import asyncio
import socket

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
