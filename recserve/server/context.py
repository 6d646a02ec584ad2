"""One HTTP request on its way through the server: what it asks for, its service, its waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

import msgspec
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope

from recserve.core.errors import DeadlineExceeded
from recserve.schemas.api import Models, Operation, is_admin
from recserve.schemas.items import MAX_TIMEOUT_MS, InvalidRequest
from recserve.schemas.text import MAX_TEXT_TIMEOUT_MS
from recserve.schemas.validation import validation_error
from recserve.server.app_state import AppState
from recserve.server.body_decoder import decode
from recserve.server.errors import BodyTooLarge, ClientGone, NotReady
from recserve.server.threads import checked_first, is_large, on_thread, reads_store
from recserve.server.trace import Trace, upload_of
from recserve.service import Service
from recserve.service.pending import Pending

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
SCOPE_KEY = "recserve.context"
DEADLINE_HEADER = "x-deadline-ms"
# The engine itself ends late requests. A route waits this much longer for the engine's error.
GRACE_S = 0.05
GONE = "the client closed the connection"


class RequestContext:
    """A request with all that its handler needs; the middleware makes one for each request.

    Attributes:
        state: State of the application.
        request: The HTTP request.
        route: The path of the table that it names; None if there is none.
        row: Any row of this path, which decides who may call it; None without a route.
        operation: The row that it asks for; None if its method does nothing here.
        parameters: Decoded parameters of the path.
        trace: What is logged and counted.
        upload: The request as its connection sees it.
    """

    def __init__(
        self,
        state: AppState,
        scope: Scope,
        receive: Receive,
        route: BaseRoute | None = None,
        operations: Mapping[str, Operation[Any, Any]] | None = None,
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        """Makes the context of a request without reading its body.

        Args:
            state: State of the application.
            scope: Scope of the request.
            receive: Receives the body, and then the end of the connection.
            route: The path of the table that it names.
            operations: The operations of this path by method.
            parameters: Decoded parameters of the path.
        """
        operations = operations or {}
        self.state = state
        self.request = Request(scope, receive)
        self.route = route
        self.row = next(iter(operations.values()), None)
        self.operation = operations.get(scope["method"])
        self.parameters = parameters or {}
        self.upload = upload_of(scope)
        self.trace = Trace()
        self.trace.began_s = self.upload.arrived_s or self.trace.began_s
        self._gone: asyncio.Task[None] | None = None

    @cached_property
    def service(self) -> Service:
        """The service, also after it has been replaced. Raises NotReady if it takes no requests."""
        return self.state.lifecycle.service

    @property
    def open(self) -> bool:
        """Whether the request needs no key."""
        return self.row is not None and self.row.open

    @property
    def counted(self) -> bool:
        """Whether the request counts for the quota of its key, and has a span."""
        return self.row is None or self.row.counted

    @property
    def admin(self) -> bool:
        """Whether the request needs an admin key. It does so below `/admin` without a route."""
        return is_admin(get_route_path(self.request.scope) if self.row is None else self.row.path)

    @property
    def models(self) -> Models:
        """Models of which one has the queue in which the request waits."""
        return () if self.operation is None else self.operation.models(self.parameters)

    def refuse_on_arrival(self) -> None:
        """Raises QueueFull if requests that came earlier fill the queue of the engine."""
        if self.upload.num_ahead and self.models:
            with contextlib.suppress(NotReady):  # the handler says so
                self.service.engine.check_queue(self.models, self.upload.num_ahead)

    def close(self) -> None:
        """Ends the watch over the connection."""
        if self._gone is not None:
            self._gone.cancel()

    async def body(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Reads and decodes the body.

        Raises:
            MalformedBody: If the body is not JSON.
            InvalidRequest: If a field is invalid.
            Exception: An error of `raw_body`.
        """
        body = decode(decoder, await self.raw_body())
        self.trace.rename(getattr(body, "request_id", None))
        return body

    async def raw_body(self) -> bytes:
        """Reads the body.

        Raises:
            BodyTooLarge: If the body is longer than `max_body_bytes`.
            ClientGone: If the client closes the connection.
            Exception: The connection's own error if it has refused the rest of the body.
        """
        limit = self.state.max_body_bytes
        announced = self.request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise BodyTooLarge(f"the body may have at most {limit} bytes, got {announced}")
        chunks = []
        size = 0
        more = True
        while more:
            message = await self.request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise BodyTooLarge(f"the body may have at most {limit} bytes, got more")
            chunks.append(chunk)
            more = message.get("more_body", False)
            if more and self.upload.error is not None:
                raise self.upload.error
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def query(self, kind: type[T]) -> T:
        """Converts the parameters of the URL to a message type.

        Raises:
            InvalidRequest: If a parameter is unknown, out of range or given twice.
        """
        given: dict[str, Any] = {}
        for name, value in self.request.query_params.multi_items():
            if name in given:
                raise InvalidRequest(name[:64], "expected one value, got several")
            given[name] = value
        try:
            return msgspec.convert(given, kind, strict=False)
        except msgspec.ValidationError as error:
            raise validation_error(str(error), given, kind) from None

    def deadline_s(self, timeout_ms: float | None) -> float:
        """Returns the deadline as a time.monotonic() value.

        It is the earlier one of `timeout_ms` and of the header X-Deadline-Ms; without both, the
        time that the settings give to items or to texts.

        Args:
            timeout_ms: Timeout in the body; None if there is none.

        Raises:
            InvalidRequest: If the header is not a positive number.
        """
        text = self.operation is not None and self.operation.text
        most_ms = MAX_TEXT_TIMEOUT_MS if text else MAX_TIMEOUT_MS
        limits: list[float] = [] if timeout_ms is None else [timeout_ms]
        header = self.request.headers.get(DEADLINE_HEADER)
        if header is not None:
            if not (header.isascii() and header.isdigit() and len(header) < 10) or not int(header):
                raise InvalidRequest(
                    "X-Deadline-Ms", f"expected 1 to {most_ms} ms, got {header[:40]!r}"
                )
            limits.append(min(int(header), most_ms))
        default_ms = self.state.text_timeout_ms if text else self.state.default_timeout_ms
        return self.trace.began_s + min(limits, default=default_ms) / 1e3

    async def from_store(self, function: Callable[..., A], *arguments: Any) -> A:
        """Calls a function that waits for the history store or for the disk, on a thread."""
        return await on_thread(self.state.threads.changes, partial(function, *arguments))

    async def begin(self, function: Callable[[B, str, float], A], body: B, deadline_s: float) -> A:
        """Calls a function that prepares a request for items, on a thread if that may take long.

        Requests that wait for a store are prepared on the store's threads, so that a store that
        hangs does not hold up requests with a history of their own.

        Args:
            function: Called with body, request id and deadline.
            body: The decoded body.
            deadline_s: time.monotonic() value of the deadline.

        Raises:
            QueueFull: If the request would be prepared for a queue that is full.
            DeadlineExceeded: If the deadline passes before it is its turn.
        """
        prepare = partial(function, body, self.trace.request_id, deadline_s)
        call = checked_first(self.service.engine, self.models, deadline_s, prepare)
        if self.service.histories.store.blocks and reads_store(body):
            return await on_thread(self.state.threads.store, call)
        if is_large(body):
            return await on_thread(self.state.threads.items, call)
        return call()

    async def begin_text(self, function: Callable[[], A], deadline_s: float) -> A:
        """Calls a function that prepares texts, on a thread, because a long one takes a while.

        Args:
            function: Applies the template and tokenises.
            deadline_s: time.monotonic() value of the deadline.

        Raises:
            QueueFull: If the request would be prepared for a queue that is full.
            DeadlineExceeded: If the deadline passes before it is its turn.
        """
        engine = self.service.engine
        engine.check_queue(self.models)
        call = checked_first(engine, self.models, deadline_s, function)
        return await on_thread(self.state.threads.text, call)

    def watch(self, deadline_s: float, what: str, end: Callable[[Exception], None]) -> Watch:
        """Calls a function when the client closes the connection, or when the deadline passes.

        Args:
            deadline_s: time.monotonic() value of the deadline.
            what: What is not ready then, for the message.
            end: Called with ClientGone or DeadlineExceeded, on the event loop.
        """
        if self._gone is None:
            self._gone = asyncio.ensure_future(self._disconnect())
        return Watch(self._gone, deadline_s, what, end)

    async def _disconnect(self) -> None:
        """Waits until the client closes the connection."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    async def wait(
        self, futures: Sequence[Future[Any]], deadline_s: float, together: bool = True
    ) -> None:
        """Waits until all futures are done; on an error it cancels the unfinished ones.

        Args:
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
        watch = self.watch(deadline_s, "the answer was ready", end)
        try:
            error = await outcome
        finally:
            watch.close()
            for future in futures:
                future.cancel()
        if error is not None:
            raise error

    async def gather(
        self,
        works: Sequence[Pending[A]],
        deadline_s: float,
        pool: ThreadPoolExecutor | None = None,
    ) -> list[A | Exception]:
        """Waits for pending answers and returns each answer or its error, in order.

        Args:
            works: The pending answers.
            deadline_s: time.monotonic() value of the deadline.
            pool: Threads that make the answers from the engine's results; None makes them here.

        Raises:
            ClientGone: If the client closes the connection; unfinished answers are cancelled.
            DeadlineExceeded: If the deadline passes; unfinished answers are cancelled.
        """
        futures = [future for work in works for future in work.futures]
        if futures:
            await self.wait(futures, deadline_s, together=False)

        def answers() -> list[A | Exception]:
            return [work.outcome() for work in works]

        return answers() if pool is None else await on_thread(pool, answers)

    def record(self, answer: A | Exception) -> A:
        """Records an answer in the trace and returns it; raises it if it is an error."""
        if isinstance(answer, Exception):
            raise answer
        timing_ms = getattr(answer, "timing_ms", None)
        self.trace.record_answer(timing_ms, getattr(answer, "strategy", "none"))
        self.trace.degraded.extend(getattr(answer, "degraded", ()))
        return answer


class Watch:
    """Waits for the end of the connection and for a deadline until it is closed.

    Attributes:
        gone: True once the client has closed the connection.
    """

    def __init__(
        self,
        gone: asyncio.Task[None],
        deadline_s: float,
        what: str,
        end: Callable[[Exception], None],
    ) -> None:
        self._task, self._end = gone, end
        self.gone = False
        late = DeadlineExceeded(f"the deadline passed before {what}")
        # The engine ends late requests itself. This timer is for an engine that is stuck.
        left_s = max(0.0, deadline_s - time.monotonic()) + GRACE_S
        self._timer = asyncio.get_running_loop().call_later(left_s, end, late)
        gone.add_done_callback(self._disconnected)

    def _disconnected(self, _: object) -> None:
        self.gone = True
        self._end(ClientGone(GONE))

    def close(self) -> None:
        """Stops waiting; `end` is not called any more."""
        self._timer.cancel()
        self._task.remove_done_callback(self._disconnected)


def context_of(scope: Scope) -> RequestContext:
    """Returns the context that the middleware put into the scope."""
    context: RequestContext = scope[SCOPE_KEY]
    return context
