"""Limits of client connections, also by the number of open files."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

from recserve.config import ServerConfig

RESERVED_FILES = 256  # not for connections: models, history store, journal


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection, and the number of connections.

    max_header_bytes: size of the URL, the headers and the trailers of one request.
    max_headers: number of headers and trailers of one request.
    header_timeout_s: time from the connection, or the first byte of a request, to its last header.
    body_timeout_s: time from the last header to the end of the body.
    unread_timeout_s: time in which a client must read some part of its answer.
    max_connections: number of connections; further clients get 503.
    """

    max_header_bytes: int = 64 << 10
    max_headers: int = 128
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    unread_timeout_s: float = 30.0
    max_connections: int = 4096

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionLimits:
        """Returns the limits that the settings name."""
        return cls(
            header_timeout_s=config.header_timeout_s,
            body_timeout_s=config.body_timeout_s,
            max_connections=config.max_connections,
        )


def possible_connections(wanted: int) -> int:
    """Returns the number of connections that may be open at once, at most `wanted`.

    Raises the soft limit on open files towards what they need, up to the hard limit.
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
