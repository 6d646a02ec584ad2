"""Counts of the headers of a request, and their limits."""

from __future__ import annotations

from recserve.server.errors import HeadersTooLarge
from recserve.server.transport.connection_limits import ConnectionLimits


class HeaderCount:
    """Counts reported headers, and the bytes that the parser has read since its last report.

    The second count is needed because the parser buffers an endless header without a report.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._num_headers = 0
        self._num_bytes = 0
        self._num_unreported = 0

    def reset(self) -> None:
        """Resets the counts for a new request."""
        self._num_headers = self._num_bytes = self._num_unreported = 0

    def url(self, size: int) -> None:
        """Counts a reported part of the URL. Raises HeadersTooLarge."""
        self._num_unreported = 0
        self._num_bytes += size
        self.check()

    def header(self, name: bytes, value: bytes) -> None:
        """Counts a reported header or trailer. Raises HeadersTooLarge."""
        self._num_headers += 1
        if self._num_headers > self._limits.max_headers:
            most = self._limits.max_headers
            raise HeadersTooLarge(f"a request may have at most {most} headers, got more")
        self.url(len(name) + len(value) + len(b": \r\n"))

    def body(self) -> None:
        """Resets the unreported bytes: they belonged to the body."""
        self._num_unreported = 0

    def add(self, size: int) -> None:
        """Counts bytes that the parser is about to read.

        Args:
            size: Number of bytes.
        """
        self._num_unreported += size

    def check(self) -> None:
        """Raises HeadersTooLarge if the sum of reported and unreported bytes exceeds the limit."""
        most = self._limits.max_header_bytes
        if self._num_bytes + self._num_unreported > most:
            raise HeadersTooLarge(f"URL and headers may have at most {most} bytes, got more")
