"""Closes connections whose clients do not read their answers."""

from __future__ import annotations

import asyncio
import socket


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
