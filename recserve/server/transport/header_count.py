"""Counts the URL, headers and trailers of a request against their limits."""

from __future__ import annotations

from recserve.server.errors import HeadersTooLarge
from recserve.server.transport.connection_limits import ConnectionLimits


class HeaderCount:
    """Counts what the parser reports, and the bytes it took since its last report.

    The parser stores a header that never ends and does not report it.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._num_headers = 0
        self._num_bytes = 0
        self._num_unreported = 0

    def begin(self) -> None:
        """A request begins."""
        self._num_headers = self._num_bytes = self._num_unreported = 0

    def url(self, size: int) -> None:
        """A part of the URL was reported. Raises HeadersTooLarge."""
        self._num_unreported = 0
        self._num_bytes += size
        self.check()

    def header(self, name: bytes, value: bytes) -> None:
        """A header or a trailer was reported. Raises HeadersTooLarge."""
        self._num_headers += 1
        if self._num_headers > self._limits.max_headers:
            most = self._limits.max_headers
            raise HeadersTooLarge(f"a request may have {most} headers, got more")
        self.url(len(name) + len(value) + len(b": \r\n"))

    def body(self) -> None:
        """A part of the body was reported."""
        self._num_unreported = 0

    def fed(self, size: int) -> None:
        """The parser is about to get so many bytes."""
        self._num_unreported += size

    def check(self) -> None:
        """Raises HeadersTooLarge if reported and unreported bytes exceed the limit together."""
        most = self._limits.max_header_bytes
        if self._num_bytes + self._num_unreported > most:
            raise HeadersTooLarge(f"URL and headers may have {most} bytes together, got more")
