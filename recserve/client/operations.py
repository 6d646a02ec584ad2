"""What the clients add to the table of operations: encoded requests, methods, streams."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload
from urllib.parse import quote, urlencode

import msgspec

from recserve.schemas.api import Api, AsyncApi, Operation, SyncApi
from recserve.schemas.browse import LISTS, join_texts
from recserve.schemas.numbers import ENCODER, exact_number
from recserve.schemas.shorthand import check_id
from recserve.schemas.text import ChatChunk, ChatRequest, CompletionRequest, CompletionResponse

A = TypeVar("A")
P = ParamSpec("P")


@dataclass(frozen=True)
class Request(Generic[A]):
    """One request of an operation.

    Attributes:
        operation: The operation.
        path: Path with encoded parameters, and the query.
        content: The body as JSON; None without one.
        answer: Type of the answer, or of a chunk of a stream.
        chunks: Whether the answer is a stream.
        repeatable: False if a request that the server has begun must not be sent again.
    """

    operation: Operation[Any, Any]
    path: str
    content: bytes | None
    answer: Any
    chunks: bool
    repeatable: bool

    @staticmethod
    def of(operation: Operation[Any, A], arguments: dict[str, Any], chunks: bool) -> Request[A]:
        """Returns the request with these arguments of the operation's method.

        Args:
            operation: The operation.
            arguments: Parameters of the path, `body` and `query`.
            chunks: Whether the request asks for a stream.
        """
        path = operation.path.replace(":path}", "}")
        names = operation.parameters
        parts = {name: _encode(check_id(name, arguments[name])) for name in names}
        body: Any = arguments.get("body")
        path = path.format_map(parts)
        if (query := arguments.get("query")) is not None:
            path += _query_string(query)
        if chunks:
            body = msgspec.structs.replace(body, stream=True)
        content = None if body is None else ENCODER.encode(body)
        answer = operation.event if chunks else operation.answer
        return Request(operation, path, content, answer, chunks, operation.repeatable(body))

    def read(self, content: bytes | bytearray) -> A:
        """Decodes an answer, or a chunk of a stream."""
        if self.answer is type(None):
            return None  # type: ignore[return-value]
        if self.answer is str:
            return content.decode()  # type: ignore[return-value]
        value: A = msgspec.json.Decoder(self.answer, float_hook=exact_number).decode(content)
        return value


def _encode(text: str) -> str:
    """Encodes a path parameter, slashes too. An id of dots is no step in the path."""
    return text.replace(".", "%2E") if text in (".", "..") else quote(text, safe="")


def _query_string(query: msgspec.Struct) -> str:
    """Returns the fields of a query that differ from their defaults."""
    default = type(query)()
    fields = msgspec.to_builtins(query)
    changed = {name: value for name, value in fields.items() if value != getattr(default, name)}
    for name in LISTS & changed.keys():
        changed[name] = join_texts([check_id(name, text) for text in changed[name]])
    return f"?{urlencode(changed)}" if changed else ""


def _bind(
    row: Operation[Any, A],
    signature: inspect.Signature,
    chunks: bool,
    client: object,
    *values: Any,
    **named: Any,
) -> tuple[Request[A], float | None]:
    """Returns the request of a call, and its deadline."""
    arguments = signature.bind(client, *values, **named).arguments
    deadline_s = arguments.pop("deadline_s", None)
    return Request.of(row, arguments, chunks), deadline_s


class Stream(Generic[P, A]):
    """A method of both clients that returns an iterator over the chunks of a stream."""

    def __init__(self, row: Operation[Any, Any], declared: Callable[..., A]) -> None:
        bind = functools.partial(_bind, row, inspect.signature(declared), True)

        @functools.wraps(declared)
        def call(client: SyncOperations, *values: Any, **named: Any) -> Any:
            return client.stream(*bind(client, *values, **named))

        self._call: Any = call

    @overload
    def __get__(self, client: SyncOperations, owner: type) -> Callable[P, Iterator[A]]: ...

    @overload
    def __get__(self, client: AsyncOperations, owner: type) -> Callable[P, AsyncIterator[A]]: ...

    @overload
    def __get__(self, client: None, owner: type) -> Callable[..., Any]: ...

    def __get__(self, client: object, owner: type) -> Any:
        return self._call if client is None else MethodType(self._call, client)


def stream(
    row: Operation[Any, Any],
) -> Callable[[Callable[Concatenate[Any, P], A]], Stream[P, A]]:
    """Declares the method that streams the answer of an operation."""

    def declare(declared: Callable[Concatenate[Any, P], A]) -> Stream[P, A]:
        return Stream(row, declared)

    return declare


class Streams:
    """The methods of both clients whose answer is a stream."""

    @stream(Api.complete)
    def stream_completion(
        self, body: CompletionRequest, deadline_s: float | None = None
    ) -> CompletionResponse:
        """Yields the pieces of a text while the server generates them."""

    @stream(Api.chat)
    def stream_chat(self, body: ChatRequest, deadline_s: float | None = None) -> ChatChunk:
        """Yields the pieces of a text while the server generates them."""


class SyncOperations(SyncApi, Streams):
    """A client whose methods wait for the answer."""

    @classmethod
    @functools.cache
    def method_of(cls, operation: Operation[Any, Any]) -> Callable[..., Any]:
        """Returns the function that calls an operation; its first argument is the client."""
        bind = functools.partial(_bind, operation, inspect.signature(operation.declared), False)

        @functools.wraps(operation.declared)
        def call(client: SyncOperations, *values: Any, **named: Any) -> Any:
            return client.send(*bind(client, *values, **named))

        return call

    def send(self, request: Request[A], deadline_s: float | None = None) -> A:
        """Sends any request and returns its answer."""
        raise NotImplementedError

    def stream(self, request: Request[A], deadline_s: float | None = None) -> Iterator[A]:
        """Sends a request with a stream as its answer, and yields the chunks."""
        raise NotImplementedError


class AsyncOperations(AsyncApi, Streams):
    """A client whose methods return coroutines."""

    @classmethod
    @functools.cache
    def method_of(cls, operation: Operation[Any, Any]) -> Callable[..., Any]:
        """Returns the function that calls an operation; its first argument is the client."""
        bind = functools.partial(_bind, operation, inspect.signature(operation.declared), False)

        @functools.wraps(operation.declared)
        async def call(client: AsyncOperations, *values: Any, **named: Any) -> Any:
            return await client.send(*bind(client, *values, **named))

        return call

    async def send(self, request: Request[A], deadline_s: float | None = None) -> A:
        """Sends any request and returns its answer."""
        raise NotImplementedError

    def stream(self, request: Request[A], deadline_s: float | None = None) -> AsyncIterator[A]:
        """Sends a request with a stream as its answer, and yields the chunks."""
        raise NotImplementedError
