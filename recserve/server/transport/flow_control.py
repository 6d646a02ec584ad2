"""Flow control of a connection: bytes held from the parser, answers that a client does not read."""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.http.flow_control import FlowControl


class HoldableFlow(FlowControl):
    """Keeps reading paused while earlier bytes wait for the parser."""

    _held = False

    def resume_reading(self) -> None:
        """Reads on, unless bytes are held."""
        if not self._held:
            super().resume_reading()

    def hold(self, held: bool, resume: bool) -> None:
        """Says whether bytes wait for the parser.

        Args:
            held: True pauses reading until the next call with False.
            resume: Whether reading resumes at once where it was paused for that reason; if not,
                it resumes with the next answer.
        """
        was_held, self._held = self._held, held
        if held:
            self.pause_reading()
        elif was_held and resume:
            self.resume_reading()


def limit_unread_answer(transport: asyncio.Transport, timeout_s: float) -> None:
    """Makes the system close a connection whose client does not read what was sent to it.

    The system applies the limit also after the server has closed its side. Only Linux has the
    option; elsewhere there is no limit.

    Args:
        transport: The connection.
        timeout_s: Time without any progress after which the connection is closed.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    opened = transport.get_extra_info("socket")
    if option is None or opened is None or opened.family == getattr(socket, "AF_UNIX", None):
        return
    opened.setsockopt(socket.IPPROTO_TCP, option, round(timeout_s * 1e3))
