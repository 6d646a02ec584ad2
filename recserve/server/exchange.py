"""Between a route and the service: bodies, deadlines, pending results, JSON answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from recserve.core.request import DeadlineExceeded
from recserve.metrics import Metrics
from recserve.schemas.items import MAX_TIMEOUT_MS, InvalidRequest
from recserve.schemas.text import MAX_TEXT_TIMEOUT_MS
from recserve.server.body_decoder import decode
from recserve.server.errors import BodyTooLarge, ClientGone
from recserve.server.lifecycle import Lifecycle
from recserve.server.transport.trace import Trace, trace_of, upload_error
from recserve.service import Service
from recserve.service.pending import Pending

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
DEADLINE_HEADER = "x-deadline-ms"
# The engine itself ends what is late; this is how much longer a route waits for it to say so.
GRACE_S = 0.05


@dataclass(frozen=True)
class Exchange:
    """What the routes of one app share.

    Attributes:
        lifecycle: Holds the service.
        metrics: Counters and histograms of the app.
        max_body_bytes: Most bytes of a request body.
        default_timeout_ms: Time of a request that names none.
        text_timeout_ms: The same for text requests.
    """

    lifecycle: Lifecycle
    metrics: Metrics
    max_body_bytes: int
    default_timeout_ms: int
    text_timeout_ms: int

    @property
    def service(self) -> Service:
        """The service. Raises NotReady."""
        return self.lifecycle.service

    async def body(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """Returns the typed body of a request.

        Raises:
            BodyTooLarge: If it is longer than `max_body_bytes`.
            MalformedBody: If it is not JSON.
            InvalidRequest: If it does not fit the message.
            ClientGone: If the client closes the connection.
            Exception: If the connection has refused the rest of the body, whatever it says.
        """
        limit = self.max_body_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise BodyTooLarge(f"the body may have {limit} bytes, got {announced}")
        chunks = []
        size = 0
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise BodyTooLarge(f"the body may have {limit} bytes, got more")
            chunks.append(chunk)
            more = message.get("more_body", False)
            error = upload_error(request.scope)
            if more and error is not None:
                raise error
        body = decode(decoder, chunks[0] if len(chunks) == 1 else b"".join(chunks))
        trace_of(request.scope).rename(getattr(body, "request_id", None))
        return body

    def deadline_s(
        self,
        request: Request,
        timeout_ms: int | None,
        default_ms: int | None = None,
        most_ms: int = MAX_TIMEOUT_MS,
    ) -> float:
        """time.monotonic() value after which the client does not want its answer.

        The sooner of `timeout_ms` and the X-Deadline-Ms header (milliseconds left, at most most_ms
        of them). default_ms: without either; None: `default_timeout_ms`.
        """
        limits = [] if timeout_ms is None else [timeout_ms]
        header = request.headers.get(DEADLINE_HEADER)
        if header is not None:
            if not (header.isascii() and header.isdigit() and len(header) < 10) or not int(header):
                raise InvalidRequest(
                    "X-Deadline-Ms", f"expected 1 to {most_ms} ms, got {header[:40]!r}"
                )
            limits.append(min(int(header), most_ms))
        left_ms = min(limits, default=default_ms or self.default_timeout_ms)
        return trace_of(request.scope).began_s + left_ms / 1e3

    def text_deadline_s(self, request: Request, timeout_ms: int | None) -> float:
        """As `deadline_s`, with the longer times that texts take."""
        return self.deadline_s(request, timeout_ms, self.text_timeout_ms, MAX_TEXT_TIMEOUT_MS)

    async def begin(
        self,
        function: Callable[[B, str, float], A],
        request: Request,
        body: B,
        deadline_s: float,
    ) -> A:
        """Starts work that reads the history store, on a thread where that may block."""
        arguments = body, trace_of(request.scope).request_id, deadline_s
        if self.service.store_blocks:
            return await asyncio.to_thread(function, *arguments)
        return function(*arguments)


async def outcomes(
    request: Request, works: Sequence[Pending[A]], deadline_s: float
) -> list[A | Exception]:
    """The answer or error of each work, in order.

    Raises ClientGone or DeadlineExceeded, after cancelling all that is not done.
    """
    futures = [work.future for work in works if work.future is not None]
    if futures:
        await ended(request, futures, deadline_s)
    return [work.outcome() for work in works]


async def ended(request: Request, futures: Sequence[Future[Any]], deadline_s: float) -> None:
    """Wait until all are done. Raises ClientGone or DeadlineExceeded; all are cancelled then."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Exception | None] = loop.create_future()
    left = len(futures)

    def end(error: Exception | None) -> None:
        if not outcome.done():
            outcome.set_result(error)

    def count() -> None:
        nonlocal left
        left -= 1
        if not left:
            end(None)

    def computed(_: Future[Any]) -> None:
        """On the engine's thread, which may outlive the loop."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(count)

    for future in futures:
        future.add_done_callback(computed)
    gone = asyncio.ensure_future(disconnected(request))
    gone.add_done_callback(lambda _: end(ClientGone("the client closed the connection")))
    late = DeadlineExceeded("the deadline passed before the answer was ready")
    timer = loop.call_later(max(0.0, deadline_s - time.monotonic()) + GRACE_S, end, late)
    try:
        error = await outcome
    finally:
        timer.cancel()
        gone.cancel()
        for future in futures:
            future.cancel()
    if error is not None:
        raise error


async def disconnected(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def finished(trace: Trace, answer: A | Exception) -> A:
    """The answer, noted in the trace. Raises the error it is."""
    if isinstance(answer, Exception):
        raise answer
    trace.strategy = getattr(answer, "strategy", "none")
    trace.timing_ms = getattr(answer, "timing_ms", None)
    return answer


_ENCODER = msgspec.json.Encoder()


def json_response(answer: Any, status: int = 200) -> Response:
    """Any message as JSON."""
    return Response(_ENCODER.encode(answer), status, media_type="application/json")
