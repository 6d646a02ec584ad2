"""uvicorn's HTTP connection with limits on the size and duration of requests.

uvicorn itself limits neither the headers, nor pipelined requests, nor the time to send a request.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from recserve.metrics import Metrics
from recserve.schemas.api import OPEN_PATHS
from recserve.server.errors import (
    HeadersTooLarge,
    MalformedRequest,
    NotReady,
    RequestTimeout,
    TooManyConnections,
    refusal_bytes,
    row_of,
)
from recserve.server.trace import UPLOAD_KEY, Upload
from recserve.server.transport.connection_limits import ConnectionLimits
from recserve.server.transport.flow_control import (
    HoldableFlow,
    OpenUntilRead,
    SlowReader,
    limit_unread_answer,
    limit_unread_bytes,
    send_without_chunks,
)
from recserve.server.transport.header_count import HeaderCount
from recserve.server.transport.pace import Arrivals
from recserve.server.transport.request_timer import RequestPart, RequestTimer

PROBES = tuple(f"{method} {path}".encode() for path in OPEN_PATHS for method in ("GET", "HEAD"))
MAX_WAITING_BYTES = 64 << 10  # of a connection whose turn has not come
SLICE_BYTES = 4096  # bounds the requests that one call of the parser can queue
# After a refusal, incoming bytes are dropped for this long. Closing at once could lose the error.
LINGER_S = 1.0
# A server that ends still answers requests that arrive within this time.
END_S = 0.2
# Versions whose clients know neither chunks nor `100 Continue`, and may leave out `Host`.
OLD_VERSIONS = ("0.9", "1.0")


class Connection(HttpToolsProtocol):
    """An HTTP connection that refuses requests beyond a limit with an error, and then closes.

    Bytes are parsed when it is the connection's turn, in slices, and only while no pipelined
    request is queued. Health probes do not wait for a turn.

    Attributes:
        limits: Limits of the connection.
        metrics: Counts the refusals.
        flow: Flow control of the transport.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        metrics: Metrics,
        arrivals: Arrivals | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._arrivals = arrivals or Arrivals(limits.max_queue)
        self._waits = False  # for its turn
        self.limits = limits
        self.metrics = metrics
        self._number = 0  # number of complete requests so far
        self._part = RequestPart.HEADERS
        self._begun = False
        self._unread = b""
        self._running: RequestResponseCycle | None = None  # the request in progress
        self._header_count = HeaderCount(limits)
        self._timer = RequestTimer(self.loop, limits)
        self._upload, self._next = Upload(), Upload()  # of this request and of the next one
        self._refusal: Exception | None = None  # once set, incoming bytes are dropped
        self._linger: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None  # set once the server ends
        self._incomplete: int | None = None  # the request whose body the last `drain` waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handles a new connection; refuses it beyond the limit of connections."""
        super().connection_made(transport)
        self.flow = self._reading = HoldableFlow(transport)
        limits = self.limits
        self._reader = SlowReader(
            transport, self.loop, limits.unread_timeout_s, limits.min_read_bytes_s
        )
        if len(self.connections) > self.limits.max_connections:
            self._refusal = TooManyConnections("the server has reached its limit of connections")
            self._write_refusal(self._refusal)
            transport.close()
        else:
            limit_unread_answer(transport, self.limits.unread_timeout_s)
            limit_unread_bytes(transport)
            self._watch()

    def pause_writing(self) -> None:
        """Handles that the client reads more slowly than the response is written."""
        super().pause_writing()
        self._reader.pause()

    def resume_writing(self) -> None:
        """Handles that the client has read most of what was written."""
        super().resume_writing()
        self._reader.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the end of the connection; stops the timers."""
        self._timer.stop()
        self._reader.resume()
        for timer in (self._linger, self._ending):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        if self._running is not None:  # uvicorn notifies only the latest request
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handles incoming bytes."""
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        if self._part is RequestPart.NOTHING:
            self._part = RequestPart.HEADERS
        self._unread += data
        if self._waits:
            self._reading.hold(len(self._unread) > MAX_WAITING_BYTES, resume=False)
        elif data.startswith(PROBES):
            self._parse()
        else:
            self._waits = True
            self._arrivals.call(partial(self._take_turn, time.monotonic()))

    def _take_turn(self, arrived_s: float, num_ahead: int) -> None:
        self._waits = False
        self._next = Upload(arrived_s=arrived_s, num_ahead=num_ahead)
        if not self.transport.is_closing():
            self._parse()

    def on_message_begin(self) -> None:
        """Parser callback: a request begins."""
        super().on_message_begin()
        self._upload.last = False
        self._part = RequestPart.HEADERS
        self._begun = True
        self._header_count.reset()
        self._upload, self._next = self._next, Upload()
        cast(dict[str, Any], self.scope)[UPLOAD_KEY] = self._upload

    def on_url(self, url: bytes) -> None:
        """Parser callback: a part of the URL."""
        self._header_count.url(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser callback: a header or a trailer. The application does not see trailers."""
        self._header_count.header(name, value)
        if self._part is RequestPart.HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Parser callback: the body follows.

        A request with `Upgrade` is ignored here, because `_ignore_upgrade` parses it again.
        """
        if self.parser.should_upgrade():
            return
        old = self.parser.get_http_version() in OLD_VERSIONS
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and not old):
            # RFC 9112, section 3.2. A proxy in front could have read another one.
            raise MalformedRequest(f"expected one header Host, got {num_hosts or 'none'}")
        if old:
            self.expect_100_continue = False
        super().on_headers_complete()
        self._running = self._running or self.cycle
        self._part = RequestPart.BODY

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Starts the application for a request; a response to an old client has no chunks."""
        if cycle.scope["http_version"] in OLD_VERSIONS:
            app = send_without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Parser callback: a part of the body."""
        self._header_count.body()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Parser callback: the request is complete.

        A request with `Upgrade` is ignored here, because `_ignore_upgrade` parses it again.
        """
        if self.parser.should_upgrade():
            return
        self._number += 1
        self._part = RequestPart.NOTHING
        self._begun = False
        self._upload.last = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Continues with the next request after the application has answered the oldest one."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.transport.is_closing() or self._linger is not None:
            return
        if self._ending is not None:
            self._end_soon()
        if self._unread or self._part is not RequestPart.NOTHING:
            self._unset_keepalive_if_required()
        if self._refusal is not None and self._running is None:
            self._send_refusal(self._refusal)
        else:
            self._parse()

    def shutdown(self) -> None:
        """Handles the end of the server: answers what arrives within END_S, and then closes."""
        self._end_soon()

    def drain(self) -> None:
        """Refuses a request whose body is still incomplete since the last call.

        A draining server calls this ten times a second. A body that is just arriving, or that waits
        for its turn, is not refused.
        """
        if self._part is not RequestPart.BODY or self._waits:
            return
        if self._incomplete == self._number:
            self._refuse_body()
        self._incomplete = self._number

    def _end_soon(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self._ending = self.loop.call_later(END_S, self._end)

    def _end(self) -> None:
        """Closes the connection, unless a request is in progress: its response calls this again."""
        if self._waits:
            self._end_soon()
        elif self._part is RequestPart.BODY:
            self._refuse_body()
        elif self._running is None and self._refusal is None:
            self.transport.close()

    def _refuse_body(self) -> None:
        if self._refusal is None:
            self._refuse(NotReady("the server is shutting down"))

    def _watch(self) -> None:
        """Runs the timer only while the server waits for the client."""
        # While the client waits for an answer, it cannot be late with the next part.
        waits = bool(self.pipeline) if self._part is RequestPart.BODY else self._running is not None
        free = self._refusal is not None or waits
        part = RequestPart.NOTHING if free else self._part
        self._timer.watch(self._number, part, self._late)

    def _late(self) -> None:
        if self._begun:
            part, limit_s = self._part.value, self._timer.seconds[self._part]
            self._refuse(RequestTimeout(f"the {part} did not arrive within {limit_s:g} s"))
        else:
            self.transport.close()

    def _parse(self) -> None:
        """Feeds the parser until no bytes are left, a request is queued or one is refused."""
        view, start = memoryview(self._unread), 0
        while start < len(view) and not self.pipeline and self._refusal is None:
            self._feed(view[start : start + SLICE_BYTES])
            start += SLICE_BYTES
        self._unread = b"" if self._refusal is not None else bytes(view[start:])
        self._reading.hold(bool(self._unread), resume=not self.pipeline)
        self._watch()

    def _feed(self, data: memoryview) -> None:
        self._header_count.add(len(data))
        try:
            self.parser.feed_data(data)
            self._header_count.check()
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, HeadersTooLarge | MalformedRequest):
                self._refuse(error.__context__)
            else:
                self._refuse(MalformedRequest("the request is not valid HTTP"))
        except HeadersTooLarge as error:
            self._refuse(error)

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Parses a request again without `Upgrade`, which would make the parser skip the body."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(MalformedRequest("CONNECT is not supported: this server is not a proxy"))
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._feed(memoryview(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(rest)))

    def _refuse(self, error: Exception) -> None:
        """Stops reading. The error follows the responses to earlier requests."""
        self._refusal = error
        self._timer.stop()
        if self._part is RequestPart.BODY:
            self._end_body(error)
        elif self._running is None:
            self._send_refusal(error)

    def _end_body(self, error: Exception) -> None:
        """Wakes the route that waits for the body, which then responds with the error."""
        if self.cycle.response_complete:
            self._end_writing()
            return
        self._upload.error = error
        self.cycle.keep_alive = False
        self.cycle.transport = OpenUntilRead(self.transport, self._end_writing)
        self.cycle.message_event.set()

    def _send_refusal(self, error: Exception) -> None:
        self._unset_keepalive_if_required()
        self._write_refusal(error)
        self._end_writing()

    def _end_writing(self) -> None:
        """Closes the sending side at once, and the receiving one when the client has closed."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger = self.loop.call_later(LINGER_S, self.transport.abort)

    def _write_refusal(self, error: Exception) -> None:
        row = row_of(error)
        self.metrics.failure(row.reason, row.code)
        path = unquote(self.url.partition(b"?")[0].decode("latin-1")) if self._begun else ""
        self.transport.write(refusal_bytes(error, path, self.server_state.default_headers))


def connection_class(limits: ConnectionLimits, metrics: Metrics) -> type[asyncio.Protocol]:
    """Returns the connection class for uvicorn's setting `http`."""
    made = partial(Connection, limits=limits, metrics=metrics, arrivals=Arrivals(limits.max_queue))
    return cast(type[asyncio.Protocol], made)
