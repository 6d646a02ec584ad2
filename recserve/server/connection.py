"""One client's HTTP connection: uvicorn's, with limits on what comes before a request is complete.

uvicorn's parser takes headers of any size and queues any number of pipelined requests.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from recserve.metrics import Metrics
from recserve.server.connection_limits import ConnectionLimits
from recserve.server.errors import HeadersTooLarge, MalformedRequest, row_of
from recserve.server.refusal import refusal_bytes
from recserve.server.upload import SCOPE_KEY, Upload

# The parser sees so many bytes at a time, so that what it keeps and queues in between is bounded.
SLICE_BYTES = 4096
# A refused client may read its answer for so long while what it still sends is thrown away: a
# connection that is closed before everything was read is reset, and the answer is lost.
LINGER_S = 1.0


class Part(Enum):
    """What of a request is expected next."""

    HEAD = "head"
    BODY = "body"


class HoldableFlow(FlowControl):
    """Flow control that does not resume reading while earlier bytes wait for the parser."""

    held = False

    def resume_reading(self) -> None:
        """Reads on, unless held."""
        if not self.held:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """Answers what exceeds a limit itself, in the one error shape, and closes.

    Pipelined requests are parsed one slice at a time, and only while none of them waits.
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
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = limits
        self.metrics = metrics
        self._part = Part.HEAD
        self._unread = b""
        self._num_headers = 0
        self._header_bytes = 0
        self._silent_bytes = 0  # since the parser last reported anything
        self._upload = Upload()
        self._refusal: Exception | None = None  # set: whatever else comes is thrown away
        self._linger: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.flow = HoldableFlow(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        if self._linger is not None:
            self._linger.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        if self._refusal is None:
            self._unread += data
            self._parse()

    def on_message_begin(self) -> None:
        """Parser: a request begins."""
        super().on_message_begin()
        self._part = Part.HEAD
        self._num_headers = self._header_bytes = 0
        self._upload = Upload()
        cast(dict[str, Any], self.scope)[SCOPE_KEY] = self._upload

    def on_url(self, url: bytes) -> None:
        """Parser: a part of the URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser: a header, or a trailer behind a body, which is not passed on."""
        self._num_headers += 1
        if self._num_headers > self.limits.max_headers:
            raise HeadersTooLarge(f"a request may have {self.limits.max_headers} headers, got more")
        self._count(len(name) + len(value) + len(b": \r\n"))
        if self._part is Part.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Parser: the body comes next, unless the request is to be read again."""
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._part = Part.BODY

    def on_body(self, body: bytes) -> None:
        """Parser: a part of the body."""
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Parser: the request is complete, unless it is to be read again."""
        if self.parser.should_upgrade():
            return
        self._part = Part.HEAD
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The application has answered the oldest request."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._refusal is not None and not self._answering():
            self._send_refusal(self._refusal)
        elif self._unread:
            self._parse()

    def _parse(self) -> None:
        """Feeds the parser until all is read, a pipelined request waits or something is refused."""
        self._unset_keepalive_if_required()
        view, start = memoryview(self._unread), 0
        while start < len(view) and not self.pipeline and self._refusal is None:
            self._feed(view[start : start + SLICE_BYTES])
            start += SLICE_BYTES
        was_held = cast(HoldableFlow, self.flow).held
        self._unread = b"" if self._refusal is not None else bytes(view[start:])
        self._hold(bool(self._unread), was_held)

    def _hold(self, held: bool, was_held: bool) -> None:
        cast(HoldableFlow, self.flow).held = held
        if held:
            self.flow.pause_reading()
        elif was_held and not self.pipeline:
            self.flow.resume_reading()

    def _feed(self, data: memoryview) -> None:
        self._silent_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, HeadersTooLarge):
                self._refuse(error.__context__)
            else:
                self._refuse(MalformedRequest("the request is not valid HTTP"))
            return
        if self._header_bytes + self._silent_bytes > self.limits.max_header_bytes:
            self._refuse(self._too_large())

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Reads a request again without its `Upgrade`, with which the parser skips the body.

        Args:
            rest: What came behind the headers.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(MalformedRequest("CONNECT is for proxies"))
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._feed(memoryview(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(rest)))

    def _count(self, size: int) -> None:
        """Counts bytes of headers that the parser has reported. Raises HeadersTooLarge."""
        self._silent_bytes = 0
        self._header_bytes += size
        if self._header_bytes > self.limits.max_header_bytes:
            raise self._too_large()

    def _too_large(self) -> HeadersTooLarge:
        limit = self.limits.max_header_bytes
        return HeadersTooLarge(f"URL and headers may have {limit} bytes together, got more")

    def _refuse(self, error: Exception) -> None:
        """Reads no further request; what is refused is answered behind what came before it."""
        self._refusal = error
        if self._part is Part.BODY:
            self._end_body(error)
        elif not self._answering():
            self._send_refusal(error)

    def _end_body(self, error: Exception) -> None:
        """The route that waits for the body answers with the error."""
        if self.cycle.response_complete:
            self.transport.close()
            return
        self._upload.error = error
        self.cycle.keep_alive = False
        self.cycle.message_event.set()

    def _send_refusal(self, error: Exception) -> None:
        self._unset_keepalive_if_required()
        self.metrics.failure(row_of(error).reason)
        self.transport.write(refusal_bytes(error, self.server_state.default_headers))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger = self.loop.call_later(LINGER_S, self.transport.abort)

    def _answering(self) -> bool:
        """Whether a request is complete up to its headers and not yet answered."""
        return self.cycle is not None and not self.cycle.response_complete


def connection_class(limits: ConnectionLimits, metrics: Metrics) -> type[asyncio.Protocol]:
    """Returns what uvicorn makes connections of (its setting `http`)."""
    return cast(type[asyncio.Protocol], partial(Connection, limits=limits, metrics=metrics))
