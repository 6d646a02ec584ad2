"""A timer that limits how long a client takes to send the next part of its request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

from recserve.server.transport.connection_limits import ConnectionLimits


class RequestPart(Enum):
    """The part of a request that the server expects next."""

    NOTHING = "nothing"
    HEADERS = "headers"
    BODY = "body"


class RequestTimer:
    """Runs at most one timer. Incoming bytes do not restart it.

    Attributes:
        seconds: Time limit of each part.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: ConnectionLimits) -> None:
        self._loop = loop
        self.seconds = {
            RequestPart.HEADERS: limits.header_timeout_s,
            RequestPart.BODY: limits.body_timeout_s,
        }
        self._watched: tuple[int, RequestPart] | None = None
        self._handle: asyncio.TimerHandle | None = None

    def watch(self, number: int, part: RequestPart, on_late: Callable[[], None]) -> None:
        """Starts the timer, unless it already runs for this part of this request.

        Args:
            number: Number of the request within the connection.
            part: The expected part; `NOTHING` stops the timer.
            on_late: Called when the part takes too long.
        """
        if self._watched == (number, part):
            return
        self.stop()
        if part is not RequestPart.NOTHING:
            self._watched = (number, part)
            self._handle = self._loop.call_later(self.seconds[part], on_late)

    def stop(self) -> None:
        """Stops the timer."""
        if self._handle is not None:
            self._handle.cancel()
        self._watched = self._handle = None
