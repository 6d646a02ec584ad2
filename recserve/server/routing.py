"""Routes of the table of operations: who handles an operation, and which one a path names.

A path is divided at its literal slashes, and then each segment is decoded. So a slash that belongs
to an id is written `%2F`: `/v1/users/x%2Fhistory` is a user, `/v1/users/x/history` is the history
of the user `x`. A path belongs to the first template that fits it, whatever the method.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar, get_type_hints
from urllib.parse import quote, unquote

import msgspec
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from recserve.schemas.api import OPERATIONS, Operation
from recserve.schemas.numbers import ENCODER
from recserve.server.context import SURROGATES, RequestContext, check_utf8, context_of
from recserve.server.threads import on_thread

A = TypeVar("A")
P = ParamSpec("P")
Read = Callable[[RequestContext], Awaitable[Any]]
Handle = Callable[..., Awaitable[A] | Awaitable[Response] | A | Response]
ORDER = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True)
class Handler:
    """What answers an operation.

    Attributes:
        function: Called with the context and the arguments of the operation. Unless it is a
            coroutine function, it is called on a thread.
        read: Reads the body; None without one.
    """

    function: Callable[..., Any]
    read: Read | None

    async def answer(self, context: RequestContext, operation: Operation[Any, Any]) -> Response:
        """Returns the response of a request."""
        arguments: dict[str, Any] = {
            name: check_utf8(name, context.parameters[name]) for name in operation.parameters
        }
        if self.read is not None:
            arguments["body"] = await self.read(context)
        if context.state.shared_catalog:  # not before the body: the wait watches the connection
            await context.await_named_version()
        if operation.query is not None:
            arguments["query"] = context.query(operation.query)
        if inspect.iscoroutinefunction(self.function):
            answer = await self.function(context, **arguments)
        else:
            call = partial(self.function, context, **arguments)
            answer = await on_thread(context.state.threads.reports, call, context.client)
        if isinstance(answer, Response):
            return answer
        if answer is None:
            return Response(status_code=operation.status)
        return json_response(answer, operation.status)


HANDLERS: dict[str, Handler] = {}
"""The handler of each operation by its name."""


def handles(
    *operations: Operation[P, A], read: Read | None = None
) -> Callable[[Handle[A]], Handle[A]]:
    """Makes a function the handler of operations. It returns the answer or a response.

    Args:
        operations: Rows of the table, which have the parameters of the function.
        read: Reads the body; None reads JSON of the operation's type.
    """

    def register(function: Handle[A]) -> Handle[A]:
        for row in operations:
            _check(row, function)
            reads = read
            if reads is None and row.body is not None:
                reads = json_body(msgspec.json.Decoder(row.body))
            HANDLERS[row.name] = Handler(function, reads)
        return function

    return register


def _check(row: Operation[Any, Any], function: Callable[..., Any]) -> None:
    """Raises TypeError unless a function takes what the operation brings."""
    types = get_type_hints(function)
    expected = {"context": RequestContext, **dict.fromkeys(row.parameters, str)}
    expected |= {"body": row.body} if row.body is not None else {}
    expected |= {"query": row.query} if row.query is not None else {}
    given = {name: types.get(name) for name in inspect.signature(function).parameters}
    if given != expected:
        raise TypeError(f"{function.__name__} handles {row.name}: expected {expected}, got {given}")


def json_body(decoder: msgspec.json.Decoder[Any]) -> Read:
    """Returns a function that reads the body of a request with a decoder."""

    async def read(context: RequestContext) -> Any:
        return await context.body(decoder)

    return read


def json_response(answer: Any, status: int = 200) -> Response:
    """Returns a message as a JSON response."""
    return Response(ENCODER.encode(answer), status, media_type="application/json")


class Template:
    """A path with parameters, segment by segment.

    Attributes:
        head: The segments before the parameter that is several segments, or all of them.
        rest: Name of that parameter; None without one.
        tail: The literal segments after it.
    """

    def __init__(self, path: str) -> None:
        parts = path[1:].split("/")
        at = next((n for n, part in enumerate(parts) if part.endswith(":path}")), None)
        self.head = tuple(map(_Segment, parts[:at]))
        self.rest = None if at is None else parts[at][1 : -len(":path}")]
        self.tail = [] if at is None else parts[at + 1 :]

    def match(self, segments: list[str]) -> dict[str, str] | None:
        """Returns the parameters of a path; None if it does not fit."""
        num_rest = len(segments) - len(self.head) - len(self.tail)
        if num_rest < 1 if self.rest is not None else num_rest != 0:
            return None
        found = self._match_head(segments)
        if found is None or self.rest is None:
            return found
        end = len(segments) - len(self.tail)
        if segments[end:] != self.tail:
            return None
        return {**found, self.rest: "/".join(segments[len(self.head) : end])}

    def ends_like(self, segments: list[str]) -> bool:
        """Whether a path begins and ends with the literal segments of this template."""
        num = len(self.tail)
        return num > 0 and segments[-num:] == self.tail and self._match_head(segments) is not None

    def _match_head(self, segments: list[str]) -> dict[str, str] | None:
        found: dict[str, str] = {}
        for part, segment in zip(self.head, segments, strict=False):
            if not part.fits(segment):
                return None
            if part.name is not None:
                found[part.name] = part.value(segment)
        return found


class _Segment:
    """One segment of a template: literal text, or a parameter between two literal texts."""

    def __init__(self, text: str) -> None:
        self.before, _, rest = text.partition("{")
        name, _, self.after = rest.partition("}")
        self.name = name or None

    def fits(self, segment: str) -> bool:
        if self.name is None:
            return segment == self.before
        literal = len(self.before) + len(self.after)
        ends = segment.startswith(self.before) and segment.endswith(self.after)
        return ends and len(segment) > literal

    def value(self, segment: str) -> str:
        return segment[len(self.before) : len(segment) - len(self.after)]


@dataclass(eq=False)
class OperationRoute(BaseRoute):
    """A path of the table on the application, with all operations on it.

    Attributes:
        path: The path template.
        operations: The operations by HTTP method.
    """

    path: str
    operations: dict[str, Operation[Any, Any]] = field(default_factory=dict)

    @property
    def methods(self) -> set[str]:
        """The HTTP methods that do something."""
        return {*self.operations, *(("HEAD",) if "GET" in self.operations else ())}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Returns whether the middleware has found this route for the request."""
        found = scope["type"] == "http" and context_of(scope).route is self
        return (Match.FULL if found else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Raises HTTPException with `Allow` if its method does nothing here."""
        context = context_of(scope)
        if context.operation is None:
            allow = ", ".join(method for method in ORDER if method in self.methods)
            raise HTTPException(405, headers={"Allow": allow})
        handler = HANDLERS[context.operation.name]
        response = await handler.answer(context, context.operation)
        await response(scope, receive, send)


class Routes:
    """All paths of the table.

    Attributes:
        by_path: The routes by path template.
    """

    def __init__(self, operations: Iterable[Operation[Any, Any]]) -> None:
        """Makes the routes.

        Raises:
            RuntimeError: If an operation has no handler, or two of one path differ in their access.
        """
        self.by_path: dict[str, OperationRoute] = {}
        for operation in operations:
            if operation.name not in HANDLERS:
                raise RuntimeError(f"no handler for {operation.name}: see handles in routing.py")
            for path in (operation.path, *operation.aliases):
                route = self.by_path.setdefault(path, OperationRoute(path))
                route.operations[operation.method] = operation
                row = next(iter(route.operations.values()))
                if (row.open, row.counted) != (operation.open, operation.counted):
                    raise RuntimeError(f"{row.name} and {operation.name} differ in their access")
        self._templates = [(Template(path), r) for path, r in self.by_path.items() if "{" in path]

    def __iter__(self) -> Iterator[OperationRoute]:
        return iter(self.by_path.values())

    def match(self, scope: Scope) -> tuple[OperationRoute | None, dict[str, str]]:
        """Returns the route of a request and the parameters in its path; None without a route."""
        path = get_route_path(scope)
        literal = self.by_path.get(path)
        if literal is not None and "{" not in path:
            return literal, {}
        raw: bytes = b"" if scope.get("root_path") else scope.get("raw_path") or b""
        raw = raw or quote(path).encode()
        parts = raw.decode("utf-8", SURROGATES)[1:].split("/")
        segments = [unquote(part, errors=SURROGATES) for part in parts]
        if segments[-1] == "":
            bare = [*segments]
            while bare and bare[-1] == "":
                bare.pop()
            if any(template.ends_like(bare) for template, _ in self._templates):
                return None, {}  # a slash too many is no other path
        for template, route in self._templates:
            found = template.match(segments)
            if found is not None:
                return route, found
        return None, {}


def make_routes() -> Routes:
    """Returns the routes of all operations. Raises RuntimeError if one has no handler."""
    return Routes(OPERATIONS.values())
