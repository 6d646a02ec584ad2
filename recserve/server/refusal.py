"""Answers that a connection writes itself, to requests that do not reach the application."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from recserve.server.errors import error_response
from recserve.server.trace import Trace

Header = tuple[bytes, bytes]


def refusal_bytes(error: Exception, default_headers: Sequence[Header]) -> bytes:
    """Returns the whole answer of an error, as the application would write it.

    Args:
        error: An exception of the table in errors.py.
        default_headers: Headers that the server gives every answer, such as `date`.
    """
    response = error_response(error)
    status = HTTPStatus(response.status_code)
    headers: list[Header] = [
        *default_headers,
        *response.raw_headers,
        *Trace().headers(),
        (b"connection", b"close"),
    ]
    lines = [b"HTTP/1.1 %d %s" % (status.value, status.phrase.encode())]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)
