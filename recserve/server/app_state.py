"""Connects routes with the service: bodies, deadlines, pending results, JSON responses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from recserve.core.errors import DeadlineExceeded
from recserve.metrics import Metrics
from recserve.schemas.browse import LISTS, split_texts
from recserve.schemas.items import (
    MAX_TIMEOUT_MS,
    InvalidRequest,
    RankBatchRequest,
    RankRequest,
    RankResponse,
    RecommendRequest,
    RecommendResponse,
)
from recserve.schemas.numbers import ENCODER
from recserve.schemas.text import MAX_TEXT_TIMEOUT_MS, TextRequest
from recserve.schemas.validation import validation_error
from recserve.server.body_decoder import decode
from recserve.server.errors import BodyTooLarge, ClientGone, NotReady
from recserve.server.lifecycle import Lifecycle
from recserve.server.threads import (
    RANK_MODELS,
    RECOMMEND_MODELS,
    Threads,
    checked_first,
    is_large,
    on_thread,
    reads_store,
)
from recserve.server.transport.trace import Trace, trace_of, upload_of
from recserve.service import Service
from recserve.service.attribution import Signer
from recserve.service.pending import Pending
from recserve.service.slate_log.slate_log import SlateLog
from recserve.service.text.pending_texts import PendingTexts
from recserve.service.text.stream import Listener

if TYPE_CHECKING:
    from recserve.experiments.serving.registry import Experiments

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
Asked = TypeVar("Asked", bound=RecommendRequest | RankRequest)
Answered = TypeVar("Answered", bound=RecommendResponse | RankResponse)
Text = TypeVar("Text", bound=TextRequest)
BeginTexts = Callable[[Text, str, float, Listener], PendingTexts]
DEADLINE_HEADER = "x-deadline-ms"
# The engine itself ends late requests. A route waits this much longer for the engine's error.
GRACE_S = 0.05


class AnswerItems(Protocol):
    """The plain `answer_items`, or that of a server with experiments."""

    async def __call__(
        self,
        app_state: AppState,
        request: Request,
        service: Service,
        begin: Callable[[Asked, str, float], Pending[Answered]],
        body: Asked,
    ) -> Answered:
        """Returns the answer of a recommend or rank request."""


class WriteTexts(Protocol):
    """The plain `write_texts`, or that of a server with experiments."""

    async def __call__(
        self, app_state: AppState, request: Request, begin: BeginTexts[Text], body: Text
    ) -> Response:
        """Returns the response of a text request."""


@dataclass(frozen=True)
class AppState:
    """State that all routes of an application share.

    Attributes:
        lifecycle: Holds the service.
        metrics: Counters and histograms of the application.
        answer_items: Answers recommend and rank requests.
        write_texts: Answers text requests.
        max_body_bytes: Upper bound on the size of a request body.
        default_timeout_ms: Timeout of an item request that does not set one.
        text_timeout_ms: Timeout of a text request that does not set one.
        slate_log: Log of slates and outcomes; None without one.
        experiments: Experiments of the server; None without any.
        stall_timeout_s: Time after which a step of the engine counts as hanging.
        threads: Threads for work that must not hold the event loop.
    """

    lifecycle: Lifecycle
    metrics: Metrics
    answer_items: AnswerItems
    write_texts: WriteTexts
    max_body_bytes: int
    default_timeout_ms: int
    text_timeout_ms: int
    slate_log: SlateLog | None = None
    experiments: Experiments | None = None
    stall_timeout_s: float = 30.0
    threads: Threads = field(default_factory=Threads)

    @property
    def service(self) -> Service:
        """The service. Raises NotReady while it takes no requests."""
        return self.lifecycle.service

    def check_ready(self) -> None:
        """Raises NotReady while the server takes no requests, or if a step of the engine hangs."""
        engine = self.service.engine
        if engine.stalled_s > self.stall_timeout_s:
            raise NotReady(f"a step of the engine has been running for {engine.stalled_s:.0f} s")

    def log_slate(self, body: RecommendRequest, answer: RecommendResponse, signer: Signer) -> None:
        """Logs a slate that is about to be returned, if slates are logged."""
        if self.slate_log is not None:
            user = None if body.user is None else body.user.id
            self.slate_log.slate(user, answer, signer)

    async def body(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """Reads and decodes the body of a request.

        Raises:
            MalformedBody: If the body is not JSON.
            InvalidRequest: If a field is invalid.
            Exception: An error of `raw_body`.
        """
        body = decode(decoder, await self.raw_body(request))
        trace_of(request.scope).rename(getattr(body, "request_id", None))
        return body

    async def raw_body(self, request: Request) -> bytes:
        """Reads the body of a request.

        Raises:
            BodyTooLarge: If the body is longer than `max_body_bytes`.
            ClientGone: If the client closes the connection.
            Exception: The connection's own error if it has refused the rest of the body.
        """
        limit = self.max_body_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise BodyTooLarge(f"the body may have at most {limit} bytes, got {announced}")
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
                raise BodyTooLarge(f"the body may have at most {limit} bytes, got more")
            chunks.append(chunk)
            more = message.get("more_body", False)
            error = upload_of(request.scope).error
            if more and error is not None:
                raise error
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def deadline_s(
        self,
        request: Request,
        timeout_ms: float | None,
        default_ms: int | None = None,
        most_ms: int = MAX_TIMEOUT_MS,
    ) -> float:
        """Returns the deadline of a request as a time.monotonic() value.

        The deadline is the earlier one of `timeout_ms` and of the header X-Deadline-Ms.

        Args:
            request: The HTTP request.
            timeout_ms: Timeout in the body; None if there is none.
            default_ms: Timeout if body and header set none; None means `default_timeout_ms`.
            most_ms: Upper bound on the value of the header.

        Raises:
            InvalidRequest: If the header is not a positive number.
        """
        limits: list[float] = [] if timeout_ms is None else [timeout_ms]
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
        """Returns the deadline of a text request, with the longer limits for texts."""
        return self.deadline_s(request, timeout_ms, self.text_timeout_ms, MAX_TEXT_TIMEOUT_MS)

    async def from_store(self, function: Callable[..., A], *arguments: Any) -> A:
        """Calls a function that waits for the history store or for the disk, on a thread."""
        return await on_thread(self.threads.changes, partial(function, *arguments))

    async def begin(
        self,
        function: Callable[[B, str, float], A],
        request: Request,
        body: B,
        deadline_s: float,
    ) -> A:
        """Calls a function that prepares a request, on a thread if that may take long.

        Requests that wait for a store are prepared on the store's threads, so that a store that
        hangs does not hold up requests with a history of their own.

        Args:
            function: Called with body, request id and deadline.
            request: The HTTP request.
            body: The decoded body.
            deadline_s: time.monotonic() value of the deadline.

        Raises:
            QueueFull: If the request would be prepared for a queue that is full.
            DeadlineExceeded: If the deadline passes before it is its turn.
        """
        arguments = body, trace_of(request.scope).request_id, deadline_s
        call: Callable[[], A] = partial(function, *arguments)
        service = self.service
        ranks = isinstance(body, RankRequest | RankBatchRequest)
        models = RANK_MODELS if ranks else RECOMMEND_MODELS
        call = checked_first(service.engine, models, deadline_s, call)
        if service.histories.store.blocks and reads_store(body):
            return await on_thread(self.threads.store, call)
        if is_large(body):
            return await on_thread(self.threads.items, call)
        return call()

    async def answer(
        self,
        function: Callable[[B, str, float], Pending[A]],
        request: Request,
        body: B,
        deadline_s: float,
    ) -> A:
        """Prepares a request, waits for it and returns the answer. Arguments are those of `begin`.

        Raises:
            ClientGone: If the client closes the connection.
            DeadlineExceeded: If the deadline passes.
            Exception: What the request fails with.
        """
        work = await self.begin(function, request, body, deadline_s)
        pool = self.threads.items if is_large(body) else None
        (outcome,) = await gather(request, [work], deadline_s, pool)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def answer_items(
    app_state: AppState,
    request: Request,
    service: Service,
    begin: Callable[[Asked, str, float], Pending[Answered]],
    body: Asked,
) -> Answered:
    """Returns the answer of a recommend or rank request.

    Args:
        app_state: State of the application.
        request: The HTTP request.
        service: The service that answers; experiments sign with it.
        begin: Starts the request on it.
        body: The decoded body.

    Raises:
        Exception: What the request fails with; row_of maps it to an HTTP error.
    """
    deadline_s = app_state.deadline_s(request, body.timeout_ms)
    answer = await app_state.answer(begin, request, body, deadline_s)
    return trace_answer(trace_of(request.scope), answer)


async def gather(
    request: Request,
    works: Sequence[Pending[A]],
    deadline_s: float,
    pool: ThreadPoolExecutor | None = None,
) -> list[A | Exception]:
    """Waits for pending answers and returns each answer or its error, in order.

    Args:
        request: The HTTP request.
        works: The pending answers.
        deadline_s: time.monotonic() value of the deadline.
        pool: Threads that make the answers from the engine's results; None makes them here.

    Raises:
        ClientGone: If the client closes the connection; unfinished answers are cancelled.
        DeadlineExceeded: If the deadline passes; unfinished answers are cancelled.
    """
    futures = [future for work in works for future in work.futures]
    if futures:
        await wait_all(request, futures, deadline_s, together=False)

    def answers() -> list[A | Exception]:
        return [work.outcome() for work in works]

    return answers() if pool is None else await on_thread(pool, answers)


async def wait_all(
    request: Request, futures: Sequence[Future[Any]], deadline_s: float, together: bool = True
) -> None:
    """Waits until all futures are done; on an error it cancels the unfinished ones.

    Args:
        request: The HTTP request.
        futures: Results of the engine.
        deadline_s: time.monotonic() value of the deadline.
        together: Whether the answer needs all results. The first failure then ends the wait.

    Raises:
        ClientGone: If the client closes the connection.
        DeadlineExceeded: If the deadline passes.
        Exception: The error of a result that the answer needs.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Exception | None] = loop.create_future()
    left = len(futures)

    def end(error: Exception | None) -> None:
        if not outcome.done():
            outcome.set_result(error)

    def count(future: Future[Any]) -> None:
        nonlocal left
        left -= 1
        if together and not future.cancelled():
            error = future.exception()
            if isinstance(error, Exception):
                end(error)
        if not left:
            end(None)

    def computed(future: Future[Any]) -> None:
        """Runs on the engine's thread, which may outlive the event loop."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(count, future)

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
    """Waits until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def trace_answer(trace: Trace, answer: A | Exception) -> A:
    """Records an answer in the trace and returns it; raises it if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    trace.record_answer(getattr(answer, "timing_ms", None), getattr(answer, "strategy", "none"))
    trace.degraded.extend(getattr(answer, "degraded", ()))
    return answer


def query_of(request: Request, kind: type[T]) -> T:
    """Converts the parameters of a request's URL to a message type.

    Raises:
        InvalidRequest: If a parameter is unknown, out of range or given twice.
    """
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            one = "one value with commas between its parts" if name in LISTS else "one value"
            raise InvalidRequest(name[:64], f"expected {one}, got several")
        given[name] = split_texts(value) if name in LISTS else value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), given, kind) from None


def json_response(answer: Any, status: int = 200) -> Response:
    """Returns a message as a JSON response."""
    return Response(ENCODER.encode(answer), status, media_type="application/json")
