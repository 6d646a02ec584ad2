"""Middleware of every route: request id, API key, cross-site check, errors, metrics."""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recserve.metrics import Metrics
from recserve.schemas.items import REQUEST_ID, InvalidRequest, TimingMs
from recserve.server.errors import ClientGone, CrossSite, Unauthorized, error_response, row_of
from recserve.server.lifecycle import Lifecycle

log = logging.getLogger(__name__)
# Orchestrators probe without a key. These paths reveal only whether the server is up.
OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"}
)


class Gate:
    """ASGI middleware in front of all routes; no other class reads API keys.

    Attributes:
        app: The application behind the gate.
        lifecycle: Counts requests in progress.
        metrics: Counts requests and failures.
        keys: Valid API keys; empty means that no key is required.
    """

    def __init__(
        self, app: ASGIApp, lifecycle: Lifecycle, metrics: Metrics, api_keys: tuple[str, ...]
    ) -> None:
        self.app = app
        self.lifecycle = lifecycle
        self.metrics = metrics
        self.keys = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to the application, or answers it with an error."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        trace = scope[SCOPE_KEY] = Trace()
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *trace.headers()]
            await send(message)

        self.lifecycle.in_flight += 1
        try:
            try:
                headers = Headers(scope=scope)
                trace.rename(headers.get(HEADER))
                self._check(scope, headers)
                await self.app(scope, receive, answer)
            except Exception as error:
                row = row_of(error)
                trace.failure = row.reason
                if row.status == 500:
                    log.error("request %s failed", trace.request_id, exc_info=error)
                elif row.status == 503 and row.message is not None:
                    # The response hides the cause; the operator needs it to repair disk or store.
                    log.warning("request %s failed: %s", trace.request_id, error)
                if not started and not isinstance(error, ClientGone):
                    await error_response(error)(scope, receive, answer)
        finally:
            self.lifecycle.in_flight -= 1
            self._count(scope, trace)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises Unauthorized or CrossSite."""
        if self.keys and scope["path"] not in OPEN_PATHS:
            given = _key(headers.get("authorization", ""))
            # Compares every key, so that the duration reveals nothing about a partial match.
            if not sum([hmac.compare_digest(given, key) for key in self.keys]):
                raise Unauthorized("a valid key is needed: Authorization: Bearer KEY")
        if scope["method"] not in ("GET", "HEAD") and headers.get("sec-fetch-site") == "cross-site":
            raise CrossSite("a page of another site may not send this request")

    def _count(self, scope: Scope, trace: Trace) -> None:
        route: Any = scope.get("route")
        seconds = time.monotonic() - trace.began_s
        self.metrics.request(getattr(route, "path", None), trace.strategy, seconds)
        if trace.failure is not None and scope["path"] not in OPEN_PATHS:
            self.metrics.failure(trace.failure)
        if trace.timing_ms is not None:
            stages = {n: getattr(trace.timing_ms, n) for n in trace.timing_ms.__struct_fields__}
            self.metrics.stages(stages)


def _key(authorization: str) -> bytes:
    """Returns the key of a `Bearer` header, or the password of a `Basic` one (from browsers)."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (ValueError, binascii.Error):
            return b""
    return b""


HEADER = "x-request-id"
_SHAPE = re.compile(REQUEST_ID.pattern or "")
SCOPE_KEY = "recserve.trace"
UPLOAD_KEY = "recserve.upload"


@dataclass
class Trace:
    """Facts about a request that the gate logs and counts.

    Attributes:
        request_id: The client's id, or a random one.
        began_s: time.monotonic() value at the start.
        strategy: Strategy of the answer; "none" until a model has answered.
        timing_ms: Times of the stages; None until a model has answered.
        failure: Label of the failure counter; None unless the request failed.
    """

    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    began_s: float = field(default_factory=time.monotonic)
    strategy: str = "none"
    timing_ms: TimingMs | None = None
    failure: str | None = None

    def rename(self, request_id: str | None) -> None:
        """Uses the client's id.

        Args:
            request_id: The id; None changes nothing.

        Raises:
            InvalidRequest: If the id is not valid as a header value.
        """
        if request_id is None:
            return
        if not _SHAPE.match(request_id):
            message = f"expected {REQUEST_ID.description}, got {request_id[:40]!r}"
            raise InvalidRequest("X-Request-Id", message)
        self.request_id = request_id

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers of every response."""
        headers = [
            (b"x-request-id", self.request_id.encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        if self.timing_ms is not None:
            stages = {
                name: getattr(self.timing_ms, name) for name in self.timing_ms.__struct_fields__
            }
            text = ", ".join(f"{name};dur={value}" for name, value in stages.items())
            headers.append((b"server-timing", text.encode()))
        return headers


def trace_of(scope: Scope) -> Trace:
    """Returns the trace that the gate put into the scope."""
    trace: Trace = scope[SCOPE_KEY]
    return trace


@dataclass
class Upload:
    """Progress of a request body.

    Attributes:
        error: Why the connection refuses the rest of the body; None while it accepts it.
    """

    error: Exception | None = None


def upload_error(scope: Scope) -> Exception | None:
    """Returns why the connection refuses the rest of a body; None if it accepts it."""
    upload: Upload | None = scope.get(UPLOAD_KEY)
    return None if upload is None else upload.error
