"""Limits of client connections, and their bound by the number of open files."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

from recserve.config import ServerConfig

RESERVED_FILES = 256  # for models, history store and journal


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection, and the number of connections.

    Attributes:
        max_header_bytes: Total size of URL, headers and trailers of a request.
        max_headers: Number of headers and trailers of a request.
        header_timeout_s: Time until the last header of a request, from its first byte. The first
            request counts from the start of the connection.
        body_timeout_s: Time from the last header to the end of the body.
        unread_timeout_s: Time in which a client must read some part of its response.
        min_read_bytes_s: Bytes per second that a client must read of a response which waits for it,
            on average over `unread_timeout_s`.
        max_connections: Number of connections; further clients get 503.
        max_queue: Number of requests that may wait for the engine; further ones get 429.
    """

    max_header_bytes: int = 64 << 10
    max_headers: int = 128
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    unread_timeout_s: float = 30.0
    min_read_bytes_s: int = 32 << 10
    max_connections: int = 4096
    max_queue: int = 1024

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionLimits:
        """Returns the limits that the settings name."""
        return cls(
            header_timeout_s=config.header_timeout_s,
            body_timeout_s=config.body_timeout_s,
            max_connections=config.max_connections,
            max_queue=config.max_queue,
        )


def possible_connections(wanted: int) -> int:
    """Returns how many connections may be open at once, at most `wanted`.

    If the soft limit on open files is too low, it is raised as far as the hard limit allows.
    """
    if sys.platform == "win32":
        return wanted
    import resource

    def soft_limit() -> float:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return float("inf") if soft == resource.RLIM_INFINITY else soft

    needed = wanted + RESERVED_FILES
    if soft_limit() < needed:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return int(max(1, min(wanted, soft_limit() - RESERVED_FILES)))
