"""The state of an application, and each request on its way through it.

A handler gets a `RequestContext`: what the request asks for, the service that answers it, and the
waits for the engine, for stores and for the end of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope

from recserve.core.client import Client
from recserve.core.errors import DeadlineExceeded
from recserve.core.plugins import request_error
from recserve.metrics import Metrics, RecentMetrics
from recserve.schemas.api import Models, Operation, is_admin
from recserve.schemas.browse import LISTS, split_texts
from recserve.schemas.experiments import UNTRACKED_HEADER
from recserve.schemas.items import (
    MAX_TIMEOUT_MS,
    InvalidRequest,
    RankRequest,
    RankResponse,
    RecommendRequest,
    RecommendResponse,
)
from recserve.schemas.text import MAX_TEXT_TIMEOUT_MS, TextRequest
from recserve.schemas.validation import validation_error
from recserve.server.body_decoder import decode
from recserve.server.errors import BodyTooLarge, ClientGone, EncodedBody, NotReady
from recserve.server.inference_counts import InferenceCounts
from recserve.server.lifecycle import Lifecycle
from recserve.server.threads import (
    LATE,
    FairThreads,
    Threads,
    is_large,
    on_thread,
    reads_store,
)
from recserve.server.trace import Trace, upload_of
from recserve.service import Service
from recserve.service.pending import ItemService, Pending, id_of_part
from recserve.service.text.pending_texts import PendingTexts
from recserve.service.text.stream import Listener

if TYPE_CHECKING:
    from recserve.experiments.registry import Experiments
    from recserve.server.heartbeat import Heartbeat

T = TypeVar("T")
A = TypeVar("A")
Asked = TypeVar("Asked", bound=RecommendRequest | RankRequest)
Answered = TypeVar("Answered", bound=RecommendResponse | RankResponse)
Text = TypeVar("Text", bound=TextRequest)
BeginTexts = Callable[[Text, str, float, Listener, Client, bool], PendingTexts]
SCOPE_KEY = "recserve.context"
DEADLINE_HEADER = "x-deadline-ms"
MIN_VERSION_HEADER = "x-recserve-min-catalog-version"
SURROGATES = "surrogateescape"  # reads bytes of an address that are not UTF-8, for `check_utf8`
# The engine itself ends late requests. A route waits this much longer for the engine's error.
GRACE_S = 0.05
GONE = "the client closed the connection"


class ServerArms(Protocol):
    """The arms of a server with experiments (`server/experiments.py`)."""

    experiments: Experiments

    async def answer_items(
        self,
        context: RequestContext,
        part: ItemService[Asked, Answered],
        body: Asked,
        request_id: str,
        deadline_s: float,
    ) -> Answered:
        """Returns the answer of the arm that is drawn for a request; arguments as in `ask`."""
        ...

    async def write_texts(
        self, context: RequestContext, begin: BeginTexts[Text], body: Text
    ) -> Response:
        """Returns the response of a text request."""
        ...


@dataclass(frozen=True)
class AppState:
    """State that all requests of an application share.

    Attributes:
        lifecycle: Holds the service.
        metrics: Counters and histograms of the application.
        recent: The metrics of the last ten minutes.
        max_body_bytes: Upper bound on the size of a request body.
        default_timeout_ms: Timeout of an item request that does not set one.
        text_timeout_ms: Timeout of a text request that does not set one.
        arms: Arms of the server's experiments; None without any.
        stall_timeout_s: Time after which a step of the engine counts as hanging.
        threads: Threads for work that must not hold the event loop.
        inferences: Answers of the Open Inference Protocol, by model and version.
        shared_catalog: Whether other servers change the items too, so that this one may be behind.
        heartbeat: Tells these servers what this one does; None without them.
    """

    lifecycle: Lifecycle
    metrics: Metrics
    recent: RecentMetrics
    max_body_bytes: int
    default_timeout_ms: int
    text_timeout_ms: int
    arms: ServerArms | None = None
    stall_timeout_s: float = 30.0
    threads: Threads = field(default_factory=Threads)
    inferences: dict[tuple[str, str], InferenceCounts] = field(default_factory=dict)
    shared_catalog: bool = False
    heartbeat: Heartbeat | None = None


class RequestContext:
    """A request with all that its handler needs; the middleware makes one for each request.

    Attributes:
        state: State of the application.
        request: The HTTP request.
        route: The path of the table that it names; None if there is none.
        row: Any row of this path, which decides who may call it; None without a route.
        operation: The row that it asks for; None if its method does nothing here.
        client: Who sends it. The middleware sets it when it admits the request.
        parameters: Decoded parameters of the path.
        trace: What is logged and counted.
        upload: The request as its connection sees it.
    """

    client: Client

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
        self._watched: asyncio.Task[None] | None = None

    @cached_property
    def service(self) -> Service:
        """The service, also after it has been replaced. Raises NotReady if it takes no requests."""
        return self.state.lifecycle.service

    @property
    def untracked(self) -> bool:
        """Whether the request is of a load test or another server, so that it is no user's."""
        return UNTRACKED_HEADER in self.request.headers

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
                self.service.engine.check_queue(self.models, self.client, self.upload.num_ahead)

    def close(self) -> None:
        """Ends the watch over the connection."""
        if self._watched is not None:
            self._watched.cancel()

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
            EncodedBody: If the body is compressed.
            BodyTooLarge: If the body is longer than `max_body_bytes`.
            ClientGone: If the client closes the connection.
            Exception: The connection's own error if it has refused the rest of the body.
        """
        limit = self.state.max_body_bytes
        for name, value in self.request.scope["headers"]:
            if name == b"content-length":
                if value.isdigit() and int(value) > limit:
                    got = value.decode()
                    raise BodyTooLarge(f"the body may have at most {limit} bytes, got {got}")
            elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                shown = ascii(value[:40].decode("latin-1"))
                raise EncodedBody(
                    f"Content-Encoding is {shown}; this server reads bodies that are not compressed"
                )
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
            InvalidRequest: If a parameter is unknown, out of range, given twice or not UTF-8.
        """
        given: dict[str, Any] = {}
        text = self.request.scope["query_string"].decode("utf-8", SURROGATES)
        for name, value in parse_qsl(text, keep_blank_values=True, errors=SURROGATES):
            check_utf8(name, value)
            if name in given:
                one = "one value with commas between its parts" if name in LISTS else "one value"
                raise InvalidRequest(name[:64], f"expected {one}, got several")
            given[name] = split_texts(value) if name in LISTS else value
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

    async def await_version(self, name: str | None, deadline_s: float) -> None:
        """Waits until the catalogue contains a version; None does not wait.

        Args:
            name: The version, as a response names it.
            deadline_s: time.monotonic() value of the deadline.

        Raises:
            CatalogBehind: If the deadline passes before.
            CatalogLost: If the log of changes has lost the version.
            InvalidRequest: If it is no name of a version.
        """
        if name is None:
            return
        catalog = self.service.catalog
        reached = catalog.reaches(name)
        if reached is not None:
            try:
                await self.wait([reached], deadline_s)
            except DeadlineExceeded:
                raise catalog.behind(name) from None

    async def await_named_version(self) -> None:
        """Waits until the catalogue contains the version that a header names. Raises as above.

        A server whose items no other one changes contains all versions that it has named.
        """
        name = self.request.headers.get(MIN_VERSION_HEADER)
        if name is not None:
            await self.await_version(name, self.deadline_s(None))

    async def from_store(self, function: Callable[..., A], *arguments: Any) -> A:
        """Calls a function that waits for the history store or for the disk, on a thread."""
        call = partial(function, *arguments)
        return await on_thread(self.state.threads.changes, call, self.client)

    async def compute(self, function: Callable[[], A], large: bool) -> A:
        """Calls a function of a request for items, on a thread if it takes milliseconds."""
        if not large:
            return function()
        return await on_thread(self.state.threads.items, function, self.client)

    async def prepare(
        self,
        function: Callable[[], A],
        deadline_s: float,
        pool: FairThreads | None,
        size: int = 0,
    ) -> A:
        """Calls a function that prepares a request, unless the request is too late or too many.

        Args:
            function: Checks the request and submits its queries to the engine.
            deadline_s: time.monotonic() value of the deadline.
            pool: Threads for a request that takes long to prepare; None calls it here.
            size: As in `FairThreads.submit`.

        Raises:
            QueueFull: If the request would be prepared for a queue that is full, or if its client
                has its share of the calls that wait for a thread.
            DeadlineExceeded: If the deadline passes before it is its turn.
        """

        def call() -> A:
            self.service.engine.check_queue(self.models, self.client)
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(LATE)
            try:
                return function()
            except Exception:
                raise
            except BaseException as error:  # on the event loop, it would end the server
                raise request_error(error) from error

        if pool is None:
            return call()
        # A full queue is no reason to wait.
        self.service.engine.check_queue(self.models, self.client)
        return await on_thread(pool, call, self.client, deadline_s, size)

    async def submit(
        self,
        part: ItemService[Asked, Answered],
        body: Asked,
        request_id: str,
        deadline_s: float,
    ) -> Pending[Answered]:
        """Prepares a request for items and submits it; arguments and errors as in `ask`."""
        begin = partial(part.begin, body, request_id, deadline_s, self.client)
        return await self.prepare(begin, deadline_s, self._item_threads(body))

    def _item_threads(self, body: object) -> FairThreads | None:
        """Returns the threads that prepare a request for items; None for the event loop.

        Requests that wait for a store have threads of their own, so that a store that hangs does
        not hold up requests with a history of their own.
        """
        if self.service.histories.store.blocks and reads_store(body):
            return self.state.threads.store
        return self.state.threads.items if is_large(body) else None

    def watch(self, deadline_s: float, what: str, end: Callable[[Exception], None]) -> Watch:
        """Calls a function when the client closes the connection, or when the deadline passes.

        Args:
            deadline_s: time.monotonic() value of the deadline.
            what: What is not ready then, for the message.
            end: Called with ClientGone or DeadlineExceeded, on the event loop.
        """
        return Watch(self._gone, deadline_s, what, end)

    async def while_connected(self, work: Coroutine[Any, Any, A]) -> A:
        """Returns the result of a coroutine; cancels it if the client leaves.

        Raises:
            ClientGone: If the client closes the connection.
        """
        task, gone = asyncio.create_task(work), self._gone
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone(GONE)
            return task.result()
        finally:
            task.cancel()

    @property
    def _gone(self) -> asyncio.Task[None]:
        """The one task that waits for the end of the connection, for all waits of the request."""
        if self._watched is None:
            self._watched = asyncio.create_task(self._disconnect())
        return self._watched

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

        def on_result(future: Future[Any]) -> None:
            """Runs on the engine's thread, which may outlive the event loop."""
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(count, future)

        for future in futures:
            future.add_done_callback(on_result)
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
        large: bool = False,
    ) -> list[A | Exception]:
        """Waits for pending answers and returns each answer or its error, in order.

        Args:
            works: The pending answers.
            deadline_s: time.monotonic() value of the deadline.
            large: Whether a thread makes the answers from the engine's results.

        Raises:
            ClientGone: If the client closes the connection; unfinished answers are cancelled.
            DeadlineExceeded: If the deadline passes; unfinished answers are cancelled.
        """
        futures = [future for work in works for future in work.futures]
        if futures:
            late = [work.late for work in works if work.late is not None]
            if late:  # the list is sent before the deadline, whatever the engine does
                deadline_s = min(deadline_s, *(one.at_s - GRACE_S for one in late))
            try:
                await self.wait(futures, deadline_s, together=False)
            except DeadlineExceeded:
                if len(late) < len(works):
                    raise

        def answers() -> list[A | Exception]:
            return [work.outcome() for work in works]

        return await self.compute(answers, large)

    async def answer(self, part: ItemService[Asked, Answered], body: Asked) -> Answered:
        """Returns the answer of a recommend or rank request, by an arm if it is in an experiment.

        Args:
            part: The part of the service that answers.
            body: The decoded body.

        Raises:
            Exception: What the request fails with; row_of maps it to an HTTP error.
        """
        deadline_s = self.deadline_s(body.timeout_ms)
        if body.min_catalog_version is not None:
            await self.await_version(body.min_catalog_version, deadline_s)
        arms = self.state.arms
        ask = self.ask if arms is None or self.untracked else partial(arms.answer_items, self)
        return self.record(await ask(part, body, self.trace.request_id, deadline_s))

    async def ask(
        self,
        part: ItemService[Asked, Answered],
        body: Asked,
        request_id: str,
        deadline_s: float,
    ) -> Answered:
        """Prepares a request, waits for the engine and returns the answer of the plain service.

        Args:
            part: The part of the service that answers.
            body: The request.
            request_id: Identifies the request.
            deadline_s: time.monotonic() value of the deadline.

        Raises:
            ClientGone: If the client closes the connection.
            DeadlineExceeded: If the deadline passes.
            Exception: What the request fails with.
        """
        try:
            work = await self.submit(part, body, request_id, deadline_s)
        except DeadlineExceeded:
            (work,) = await self._begin_late(part, [body], [request_id])
        (outcome,) = await self.gather([work], deadline_s, is_large(body))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def answer_all(
        self,
        part: ItemService[Asked, Answered],
        bodies: list[Asked],
        submit: Callable[[], list[Pending[Answered]]],
        deadline_s: float,
    ) -> list[Answered | Exception]:
        """Returns the answers of several requests in one body, each the answer or its error.

        Args:
            part: The part of the service that answers.
            bodies: The requests.
            submit: Submits all of them at once, where no experiment draws arms for them.
            deadline_s: time.monotonic() value of the deadline.

        Raises:
            Exception: As in `ask`, if all fail together.
        """
        arms = self.state.arms
        if arms is None or self.untracked:
            try:
                works = await self.prepare(submit, deadline_s, self._item_threads(bodies))
            except DeadlineExceeded:
                ids = [id_of_part(self.trace.request_id, number) for number in range(len(bodies))]
                works = await self._begin_late(part, bodies, ids)
            return await self.gather(works, deadline_s, is_large(bodies))

        async def answer(number: int, body: Asked) -> Answered | Exception:
            request_id = body.request_id or id_of_part(self.trace.request_id, number)
            own_s = deadline_s
            if body.timeout_ms is not None:
                own_s = min(deadline_s, self.deadline_s(body.timeout_ms))
            try:
                return await arms.answer_items(self, part, body, request_id, own_s)
            except ClientGone:
                raise
            except Exception as error:
                return error

        part.check_together(bodies)
        tasks = [asyncio.create_task(answer(*each)) for each in enumerate(bodies)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _begin_late(
        self, part: ItemService[Asked, Answered], bodies: Sequence[Asked], ids: Sequence[str]
    ) -> list[Pending[Answered]]:
        """Starts what requests want at a deadline that passed before they were prepared.

        Raises:
            DeadlineExceeded: If one of them wants no list.
        """

        def begin() -> list[Pending[Answered]]:
            works = [part.begin_late(*each) for each in zip(bodies, ids, strict=True)]
            found = [work for work in works if work is not None]
            if len(found) < len(works):
                raise DeadlineExceeded(LATE)
            return found

        return await self.compute(begin, is_large(list(bodies)))

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
        gone.add_done_callback(self._on_disconnect)

    def _on_disconnect(self, _: object) -> None:
        self.gone = True
        self._end(ClientGone(GONE))

    def close(self) -> None:
        """Stops waiting; `end` is not called any more."""
        self._timer.cancel()
        self._task.remove_done_callback(self._on_disconnect)


def context_of(scope: Scope) -> RequestContext:
    """Returns the context that the middleware put into the scope."""
    context: RequestContext = scope[SCOPE_KEY]
    return context


def check_utf8(name: str, value: str) -> str:
    """Returns a parameter of an address.

    Args:
        name: Name of the parameter.
        value: Text read with `SURROGATES`.

    Raises:
        InvalidRequest: If name or value are not UTF-8.
    """
    for text in (name, value):
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                place = ascii(text[:64].encode("utf-8", SURROGATES))[1:]
                param = name[:64].encode("ascii", "replace").decode()
                raise InvalidRequest(param, f"expected UTF-8 in the address, got {place}") from None
    return value
