"""One deadline for all socket operations of a synchronous exchange.

httpx limits each read and each write. A server that sends a byte now and then would keep the client
waiting for ever. Here the limit of each operation is the time that is left then.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

WRITTEN_AT_ONCE = 1 << 14


class Deadline(float):
    """A timeout for httpx: the seconds that are left, at the time when it was made.

    Attributes:
        until_s: time.monotonic() value of the deadline.
    """

    until_s: float

    def __new__(cls, until_s: float) -> Deadline:
        """Returns the timeout of an exchange that ends at `until_s`."""
        deadline = super().__new__(cls, max(until_s - time.monotonic(), 0.0))
        deadline.until_s = until_s
        return deadline


def _left_s(timeout: float | None, late: type[Exception]) -> float | None:
    """Returns the timeout of an operation that starts now. Raises `late` if no time is left."""
    if not isinstance(timeout, Deadline):
        return timeout
    left_s = timeout.until_s - time.monotonic()
    if left_s <= 0:
        raise late
    return left_s


class _Stream(httpcore.NetworkStream):
    """A socket whose operations read a Deadline anew."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), WRITTEN_AT_ONCE):
            part = buffer[start : start + WRITTEN_AT_ONCE]
            self._stream.write(part, _left_s(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, left_s))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Backend(httpcore.NetworkBackend):
    """Opens such sockets."""

    def __init__(self, backend: httpcore.NetworkBackend) -> None:
        self._backend = backend

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._backend.connect_tcp(host, port, left_s, local_address, socket_options))

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._backend.connect_unix_socket(path, left_s, socket_options))

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


def use_deadlines(http: httpx.Client) -> None:
    """Makes the sockets of a client, also those to a proxy, end at the Deadline of a request."""
    for transport in (http._transport, *http._mounts.values()):
        pool = getattr(transport, "_pool", None)
        if isinstance(pool, httpcore.ConnectionPool):
            pool._network_backend = _Backend(pool._network_backend)
