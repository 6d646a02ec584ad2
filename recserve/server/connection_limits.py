"""What one connection may ask of the server before a request is complete."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection.

    max_header_bytes: of the request line, the headers and the trailers of one request.
    max_headers: header and trailer lines of one request.
    """

    max_header_bytes: int = 64 << 10
    max_headers: int = 128
