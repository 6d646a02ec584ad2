"""A listening socket that is about to be closed: no new handshakes, so that none is cut off."""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
import sys
from asyncio.trsock import TransportSocket

log = logging.getLogger(__name__)
SO_ATTACH_FILTER = 26  # the socket module has no name for it
# Classic BPF on the TCP header: drops a segment with SYN and without ACK, keeps all others.
FLAGS_OFFSET, SYN, SYN_ACK = 13, 0x02, 0x12
LOAD_BYTE, AND, JUMP_IF_EQUAL, RETURN = 0x30, 0x54, 0x15, 0x06
NO_SYN = (
    (LOAD_BYTE, 0, 0, FLAGS_OFFSET),
    (AND, 0, 0, SYN_ACK),
    (JUMP_IF_EQUAL, 0, 1, SYN),
    (RETURN, 0, 0, 0),
    (RETURN, 0, 0, 0xFFFFFFFF),
)


def drop_handshakes(listener: TransportSocket | socket.socket) -> bool:
    """Makes the system ignore clients that begin to connect; handshakes in progress go on.

    Closing a listening socket resets the connections that are not accepted yet. After this call no
    new ones come, so all of them can be accepted first. A client that is ignored tries again after
    a second, and is then refused, because the socket has been closed. Only Linux has such filters;
    other systems reset a connection that arrives in the last moment.

    Args:
        listener: A listening TCP socket.

    Returns:
        Whether the system does so.

    Source: Linux, Documentation/networking/filter.rst.
    """
    if not sys.platform.startswith("linux") or listener.family == socket.AF_UNIX:
        return False
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in NO_SYN)
    memory = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(NO_SYN), ctypes.addressof(memory))
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    except OSError as error:
        log.debug("the system does not filter a listening socket: %s", error)
        return False
    return True
