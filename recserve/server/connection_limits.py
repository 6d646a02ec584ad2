"""Limits of client connections."""

from __future__ import annotations

from dataclasses import dataclass

from recserve.config import ServerConfig


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
