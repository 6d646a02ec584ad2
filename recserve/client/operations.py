"""The operations of the HTTP API: one declaration per operation makes the methods of both clients.

A declaration is a method without code. Its route, parameters, return type and first line of text
are the operation's row: `OPERATIONS` has all rows by name.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints, overload
from urllib.parse import quote, urlencode

import msgspec

from recserve.schemas import admin as a
from recserve.schemas import browse as b
from recserve.schemas import encoding as c
from recserve.schemas import events as e
from recserve.schemas import experiments as x
from recserve.schemas import inference as i
from recserve.schemas import items as m
from recserve.schemas import scoring as s
from recserve.schemas import text as t
from recserve.schemas.numbers import ENCODER, exact_number
from recserve.schemas.shorthand import AnyId, checked_id

A = TypeVar("A")
P = ParamSpec("P")
Json = dict[str, Any]


@dataclass(frozen=True)
class Operation(Generic[A]):
    """A row of the HTTP API.

    Attributes:
        name: Name of the clients' method.
        method: HTTP method.
        path: Path with the names of its parameters in braces.
        body: Type of the body or of the query; None without one.
        answer: Type of the answer, or of a chunk of a stream. `str` is the body as text, NoneType
            an answer without a body.
        summary: What the operation does, in one line.
        repeatable: Whether a request with this body may be sent again after the server began it.
        text: Whether the answer may take as long as a text.
        chunks: Whether the answer is a stream.
    """

    name: str
    method: str
    path: str
    body: type[msgspec.Struct] | None
    answer: Any
    summary: str
    repeatable: Callable[[Any], bool]
    text: bool
    chunks: bool


OPERATIONS: dict[str, Operation[Any]] = {}
"""All operations by name, in the order of their declarations."""


@dataclass(frozen=True)
class Request(Generic[A]):
    """One request of an operation.

    Attributes:
        operation: The operation.
        path: Path with encoded parameters, and the query.
        content: The body as JSON; None without one.
        repeatable: False if a request that the server has begun must not be sent again.
    """

    operation: Operation[A]
    path: str
    content: bytes | None
    repeatable: bool

    @staticmethod
    def of(operation: Operation[A], arguments: dict[str, Any]) -> Request[A]:
        """Returns the request with these arguments of the operation's method."""
        path = operation.path
        names = [name for name in arguments if f"{{{name}}}" in path]
        parts = {name: _encode(checked_id(name, arguments[name])) for name in names}
        body: Any = arguments.get("body")
        path = path.format_map(parts)
        if (query := arguments.get("query")) is not None:
            path += _query_string(query)
        if operation.chunks:
            body = msgspec.structs.replace(body, stream=True)
        content = None if body is None else ENCODER.encode(body)
        return Request(operation, path, content, operation.repeatable(body))

    def read(self, content: bytes | bytearray) -> A:
        """Decodes an answer, or a chunk of a stream."""
        answer = self.operation.answer
        if answer is type(None):
            return None  # type: ignore[return-value]
        if answer is str:
            return content.decode()  # type: ignore[return-value]
        value: A = msgspec.json.Decoder(answer, float_hook=exact_number).decode(content)
        return value


def _encode(text: str) -> str:
    """Encodes a path parameter, slashes too. An id of dots is no step in the path."""
    return text.replace(".", "%2E") if text in (".", "..") else quote(text, safe="")


def _query_string(query: msgspec.Struct) -> str:
    """Returns the fields of a query that differ from their defaults."""
    default = type(query)()
    fields = msgspec.to_builtins(query)
    changed = {name: value for name, value in fields.items() if value != getattr(default, name)}
    for name in b.LISTS & changed.keys():
        changed[name] = b.join_texts([checked_id(name, text) for text in changed[name]])
    return f"?{urlencode(changed)}" if changed else ""


def always(_: object) -> bool:
    """A request that may be sent again in any case."""
    return True


def never(_: object) -> bool:
    """A request that must not be sent again once the server has begun it."""
    return False


def _have_ids(body: e.EventsRequest) -> bool:
    return all(event.event_id is not None for event in body.events)


def _bind(
    row: Operation[A], signature: inspect.Signature, client: object, *values: Any, **named: Any
) -> tuple[Request[A], float | None]:
    """Returns the request of a call, and its deadline."""
    arguments = signature.bind(client, *values, **named).arguments
    deadline_s = arguments.pop("deadline_s", None)
    return Request.of(row, arguments), deadline_s


class _Method(Generic[P, A]):
    """Makes a declaration a method of both clients, with its signature and its text."""

    def __init__(self, row: Operation[A], declared: Callable[..., A]) -> None:
        bind = functools.partial(_bind, row, inspect.signature(declared))

        @functools.wraps(declared)
        def call(client: SyncOperations, *values: Any, **named: Any) -> A | Iterator[A]:
            request = bind(client, *values, **named)
            return client.stream(*request) if row.chunks else client.send(*request)

        @functools.wraps(declared)
        async def call_async(client: AsyncOperations, *values: Any, **named: Any) -> A:
            return await client.send(*bind(client, *values, **named))

        @functools.wraps(declared)
        def stream_async(client: AsyncOperations, *values: Any, **named: Any) -> AsyncIterator[A]:
            return client.stream(*bind(client, *values, **named))

        self._call: Any = call
        self._call_async: Any = stream_async if row.chunks else call_async

    def bound(self, client: object, owner: type) -> Any:
        """Returns the function of a class of clients, or the method of a client."""
        function = self._call_async if issubclass(owner, AsyncOperations) else self._call
        return function if client is None else MethodType(function, client)


class _Call(_Method[P, A]):
    """A method that returns the answer, and in the asynchronous client a coroutine of it."""

    @overload
    def __get__(self, client: SyncOperations, owner: type) -> Callable[P, A]: ...

    @overload
    def __get__(
        self, client: AsyncOperations, owner: type
    ) -> Callable[P, Coroutine[Any, Any, A]]: ...

    @overload
    def __get__(self, client: None, owner: type) -> Callable[..., Any]: ...

    def __get__(self, client: object, owner: type) -> Any:
        return self.bound(client, owner)


class _Stream(_Method[P, A]):
    """A method that returns an iterator over the chunks of a stream."""

    @overload
    def __get__(self, client: SyncOperations, owner: type) -> Callable[P, Iterator[A]]: ...

    @overload
    def __get__(self, client: AsyncOperations, owner: type) -> Callable[P, AsyncIterator[A]]: ...

    @overload
    def __get__(self, client: None, owner: type) -> Callable[..., Any]: ...

    def __get__(self, client: object, owner: type) -> Any:
        return self.bound(client, owner)


def operation(
    route: str, repeatable: Callable[[Any], bool] = always, text: bool = False
) -> Callable[[Callable[Concatenate[Any, P], A]], _Call[P, A]]:
    """Declares an operation. The parameters of its route have the names of its arguments.

    Args:
        route: HTTP method and path.
        repeatable: Whether a request with this body may be sent again after the server began it.
        text: Whether the answer may take as long as a text.
    """

    def declare(declared: Callable[Concatenate[Any, P], A]) -> _Call[P, A]:
        return _Call(_row(route, declared, repeatable, text), declared)

    return declare


def stream(route: str) -> Callable[[Callable[Concatenate[Any, P], A]], _Stream[P, A]]:
    """Declares an operation whose answer is a stream of the declared type."""

    def declare(declared: Callable[Concatenate[Any, P], A]) -> _Stream[P, A]:
        return _Stream(_row(route, declared, always, text=True, chunks=True), declared)

    return declare


def _row(
    route: str,
    declared: Callable[..., A],
    repeatable: Callable[[Any], bool],
    text: bool,
    chunks: bool = False,
) -> Operation[A]:
    """Adds the row of a declaration to OPERATIONS."""
    method, path = route.split()
    types = get_type_hints(declared)
    row: Operation[A] = Operation(
        name=declared.__name__,
        method=method,
        path=path,
        body=types.get("body", types.get("query")),
        answer=types["return"],
        summary=(declared.__doc__ or "").partition("\n")[0],
        repeatable=repeatable,
        text=text,
        chunks=chunks,
    )
    OPERATIONS[row.name] = row
    return row


class Operations:
    """The methods of both clients. Each takes its deadline in seconds."""

    @operation("POST /v1/recommend")
    def recommend(
        self, body: m.RecommendRequest, deadline_s: float | None = None
    ) -> m.RecommendResponse:
        """Returns the k best items for a user or a history."""

    @operation("POST /v1/rank")
    def rank(self, body: m.RankRequest, deadline_s: float | None = None) -> m.RankResponse:
        """Returns the given candidates, best first."""

    @operation("POST /v1/rank:batch")
    def rank_batch(
        self, body: m.RankBatchRequest, deadline_s: float | None = None
    ) -> m.RankBatchResponse:
        """Returns one ranking or error per request."""

    @operation("POST /v1/events", repeatable=_have_ids)
    def add_events(
        self, body: e.EventsRequest, deadline_s: float | None = None
    ) -> e.EventsResponse:
        """Stores events and corrections."""

    @operation("GET /v1/event-types")
    def event_types(self, deadline_s: float | None = None) -> e.EventTypesResponse:
        """Returns the names of the event types that events may have."""

    @operation("GET /v1/users/{user_id}/history")
    def history(self, user_id: AnyId, deadline_s: float | None = None) -> e.HistoryResponse:
        """Returns a user's events, oldest first."""

    @operation("DELETE /v1/users/{user_id}")
    def delete_user(self, user_id: AnyId, deadline_s: float | None = None) -> None:
        """Deletes a user's stored events."""

    @operation("PUT /v1/items")
    def put_items(self, body: m.ItemsRequest, deadline_s: float | None = None) -> m.ItemsResponse:
        """Inserts and updates items."""

    @operation("GET /v1/items/{item_id}")
    def item(self, item_id: AnyId, deadline_s: float | None = None) -> m.ItemResponse:
        """Returns one item of the catalogue."""

    @operation("GET /v1/items")
    def items(self, query: b.ItemsQuery, deadline_s: float | None = None) -> b.ItemPage:
        """Returns a page of the catalogue, most popular items first, or the items of `ids`."""

    @operation("GET /v1/users")
    def users(self, query: b.UsersQuery, deadline_s: float | None = None) -> b.UserPage:
        """Returns a page of the ids of users with stored events."""

    @operation("DELETE /v1/items/{item_id}", repeatable=never)
    def hide_item(self, item_id: AnyId, deadline_s: float | None = None) -> m.HideItemResponse:
        """Removes an item from all answers."""

    @operation("POST /v1/items:rollback")
    def rollback_items(
        self, body: m.RollbackRequest, deadline_s: float | None = None
    ) -> m.RollbackResponse:
        """Restores the items of an earlier catalogue version."""

    @operation("POST /v1/completions", text=True)
    def complete(
        self, body: t.CompletionRequest, deadline_s: float | None = None
    ) -> t.CompletionResponse:
        """Continues a prompt."""

    @operation("POST /v1/chat/completions", text=True)
    def chat(self, body: t.ChatRequest, deadline_s: float | None = None) -> t.ChatResponse:
        """Generates the assistant's next turn."""

    @operation("POST /v1/rerank", text=True)
    def rerank(self, body: s.RerankRequest, deadline_s: float | None = None) -> s.RerankResponse:
        """Sorts documents by relevance, in Jina's format."""

    @operation("POST /v2/rerank", text=True)
    def rerank_v2(self, body: s.RerankRequest, deadline_s: float | None = None) -> s.RerankResponse:
        """Sorts documents by relevance, in Cohere's format."""

    @operation("POST /generative_scoring", text=True)
    def generative_scoring(
        self, body: s.GenerativeScoringRequest, deadline_s: float | None = None
    ) -> s.GenerativeScoringResponse:
        """Returns probabilities of label tokens after a query and each item."""

    @operation("POST /v1/embeddings", text=True)
    def embeddings(
        self, body: c.EmbeddingsRequest, deadline_s: float | None = None
    ) -> c.EmbeddingsResponse:
        """Returns a vector for each text."""

    @operation("POST /tokenize")
    def tokenize(
        self, body: c.TokenizeRequest, deadline_s: float | None = None
    ) -> c.TokenizeResponse:
        """Returns the tokens of a text or of a chat's prompt."""

    @operation("POST /detokenize")
    def detokenize(
        self, body: c.DetokenizeRequest, deadline_s: float | None = None
    ) -> c.DetokenizeResponse:
        """Returns the text of tokens."""

    @operation("GET /tokenizer_info")
    def tokenizer_info(self, deadline_s: float | None = None) -> c.TokenizerInfo:
        """Returns the special tokens and the chat template of the language model."""

    @operation("GET /v1/models")
    def models(self, deadline_s: float | None = None) -> Json:
        """Returns the served models."""

    @operation("GET /v1/models/{name}")
    def model(self, name: str, deadline_s: float | None = None) -> Json:
        """Returns one of the models."""

    @operation("GET /version")
    def version(self, deadline_s: float | None = None) -> Json:
        """Returns the versions of program, models and catalogue."""

    @operation("GET /metrics")
    def metrics(self, deadline_s: float | None = None) -> str:
        """Returns the metrics in the text format of Prometheus."""

    @operation("GET /v2")
    def server_metadata(self, deadline_s: float | None = None) -> i.ServerMetadata:
        """Returns name and version of the server."""

    @operation("GET /v2/models/{name}")
    def model_metadata(self, name: str, deadline_s: float | None = None) -> i.ModelMetadata:
        """Returns inputs and outputs of `recommend` or `rank`."""

    @operation("GET /v2/models/{name}/config")
    def model_config(self, name: str, deadline_s: float | None = None) -> i.ModelConfig:
        """Returns the configuration of a model in Triton's form."""

    @operation("GET /v2/models/{name}/stats")
    def model_statistics(self, name: str, deadline_s: float | None = None) -> i.Statistics:
        """Returns what the server has answered with a model since it started."""

    @operation("GET /v2/models/stats")
    def all_statistics(self, deadline_s: float | None = None) -> i.Statistics:
        """Returns what the server has answered since it started, of all models."""

    @operation("GET /v2/models/{name}/ready")
    def model_ready(self, name: str, deadline_s: float | None = None) -> i.ModelReady:
        """Returns whether a model takes requests. Raises ApiError if not."""

    @operation("POST /admin/bundle:load", repeatable=never)
    def load_bundle(
        self, body: a.BundleLoadRequest, deadline_s: float | None = None
    ) -> a.BundleStatus:
        """Starts to load another bundle."""

    @operation("POST /admin/bundle:rollback", repeatable=never)
    def rollback_bundle(self, deadline_s: float | None = None) -> a.BundleStatus:
        """Starts to restore the previous bundle."""

    @operation("GET /admin/bundle")
    def bundle_status(self, deadline_s: float | None = None) -> a.BundleStatus:
        """Returns the served bundle and the latest replacement."""

    @operation("POST /v2/models/{name}/infer")
    def infer(
        self, name: str, body: i.InferRequest, deadline_s: float | None = None
    ) -> i.InferResponse:
        """Recommends or ranks for several users, given and returned as tensors."""

    @operation("GET /v1/experiments")
    def experiments(self, deadline_s: float | None = None) -> x.ExperimentsResponse:
        """Returns the state of all experiments and of their arms."""

    @operation("POST /admin/experiments/{name}:stop")
    def stop_experiment(self, name: str, deadline_s: float | None = None) -> x.ExperimentStatus:
        """Stops an experiment: every request gets the control. Needs an admin key."""

    @operation("POST /admin/experiments/{name}:start")
    def start_experiment(self, name: str, deadline_s: float | None = None) -> x.ExperimentStatus:
        """Starts a stopped or fallen-back experiment again. Needs an admin key."""

    @operation("GET /health/live")
    def live(self, deadline_s: float | None = None) -> Json:
        """Returns if the process runs (`/health/live`). Raises ApiError if not."""

    @operation("GET /v2/health/live")
    def live_v2(self, deadline_s: float | None = None) -> Json:
        """Returns if the process runs (`/v2/health/live`). Raises ApiError if not."""

    @operation("GET /ping")
    def ping(self, deadline_s: float | None = None) -> Json:
        """Returns if the server takes requests (`/ping`). Raises ApiError if not."""

    @operation("GET /health")
    def health(self, deadline_s: float | None = None) -> Json:
        """Returns if the server takes requests (`/health`). Raises ApiError if not."""

    @operation("GET /health/ready")
    def ready(self, deadline_s: float | None = None) -> Json:
        """Returns if the server takes requests (`/health/ready`). Raises ApiError if not."""

    @operation("GET /v2/health/ready")
    def ready_v2(self, deadline_s: float | None = None) -> Json:
        """Returns if the server takes requests (`/v2/health/ready`). Raises ApiError if not."""

    @stream("POST /v1/completions")
    def stream_completion(
        self, body: t.CompletionRequest, deadline_s: float | None = None
    ) -> t.CompletionResponse:
        """Yields the pieces of a text while the server generates them."""

    @stream("POST /v1/chat/completions")
    def stream_chat(self, body: t.ChatRequest, deadline_s: float | None = None) -> t.ChatChunk:
        """Yields the pieces of a text while the server generates them."""


class SyncOperations(Operations):
    """A client whose methods wait for the answer."""

    def send(self, request: Request[A], deadline_s: float | None = None) -> A:
        """Sends any request and returns its answer."""
        raise NotImplementedError

    def stream(self, request: Request[A], deadline_s: float | None = None) -> Iterator[A]:
        """Sends a request with a stream as its answer, and yields the chunks."""
        raise NotImplementedError


class AsyncOperations(Operations):
    """A client whose methods return coroutines."""

    async def send(self, request: Request[A], deadline_s: float | None = None) -> A:
        """Sends any request and returns its answer."""
        raise NotImplementedError

    def stream(self, request: Request[A], deadline_s: float | None = None) -> AsyncIterator[A]:
        """Sends a request with a stream as its answer, and yields the chunks."""
        raise NotImplementedError
