"""The HTTP API as one table: each operation is a row, and everything about a route follows from it.

A row is a method without code. Its route, parameters, return type and first line of text are the
columns that a client sees; the arguments of `operation` are the others. From the row follow

- the route of the server, the methods in `Allow`, the name in metrics and logs;
- who may call it, when it is refused on arrival, how long it may take;
- its description in /openapi.json, with the codes of its errors;
- a method of both clients, and whether they may send the request again.

To add an operation, write its messages, its row, its handler (`handles` in `server/routing.py`) and
what the handler calls. A server without a handler for a row does not start.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints, overload

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
from recserve.schemas.shorthand import AnyId

A = TypeVar("A")
P = ParamSpec("P")
Json = dict[str, Any]
Models = tuple[str, ...]

ADMIN = "/admin"
# Models of which one has the queue in which a request waits.
RECOMMENDER: Models = ("recommender",)
RANKER: Models = ("ranker", "recommender")
TEXT: Models = ("text",)
# Codes of errors that several operations share.
LANGUAGE = ("unknown_model", "unsupported", "context_length_exceeded")
# Of requests that wait for a thread of the tokeniser, and for no queue.
ENCODED = (*LANGUAGE, "deadline_exceeded")
HISTORY = ("corrupt_history", "history_unavailable")
# Of requests that name a version of the catalogue.
BEHIND = ("catalog_behind", "catalog_version_lost")
CHANGE = ("items_read_only", "catalog_unavailable", "catalog_conflict", *BEHIND)
EXPERIMENT = ("unknown_experiment", "experiment_not_saved")


def always(_: object) -> bool:
    """A request that may be sent again in any case."""
    return True


def never(_: object) -> bool:
    """A request that must not be sent again once the server has begun it."""
    return False


def have_ids(body: e.EventsRequest) -> bool:
    """Whether all events have an id, so that the server knows those that it has stored."""
    return all(event.event_id is not None for event in body.events)


@dataclass(frozen=True, eq=False)
class Operation(Generic[P, A]):
    """A row of the HTTP API, and as an attribute of a client the method that calls it.

    Attributes:
        declared: The declaration; it has the parameters of the clients' method.
        name: Name of the clients' method, and `operationId`.
        method: HTTP method. HEAD is answered wherever GET is.
        path: Path with the names of its parameters in braces. A parameter is one segment of the
            path; `{name:path}` is one or several.
        aliases: Further paths of the operation, which are not described.
        parameters: Names of the path's parameters.
        body: Type of the JSON body; None without one.
        query: Type of the query string; None without one.
        answer: Type of the answer. `str` is the body as text, NoneType an answer without a body.
        event: Type of an event, if the body may ask for a stream; else None.
        summary: What the operation does, in one line.
        status: HTTP status of an answer.
        invalid_status: HTTP status if a field is out of range. It is 400 on the routes of texts
            under `/v1` and on vLLM's `/generative_scoring`, whose clients know no 422.
        open: Needs no key. It then reveals only whether the server is up.
        counted: Counts for the quota of the key, and has a trace.
        queue: Models of which one has the queue in which the request waits, by the parameter
            `name` if the path has one; empty without a queue. A full queue refuses the request
            on arrival.
        errors: Codes of errors beyond those that follow from the other columns.
        repeatable: Whether a request with this body may be sent again after the server began it.
        per_process: Changes something that other processes do not see; items and experiments only
            if the servers do not share a catalogue.
        described: Stands in /openapi.json.
    """

    declared: Callable[Concatenate[Any, P], A]
    name: str
    method: str
    path: str
    aliases: tuple[str, ...]
    parameters: tuple[str, ...]
    body: type[msgspec.Struct] | None
    query: type[msgspec.Struct] | None
    answer: Any
    event: type[msgspec.Struct] | None
    summary: str
    status: int
    invalid_status: int
    open: bool
    counted: bool
    queue: Models | Mapping[str, Models]
    errors: tuple[str, ...]
    repeatable: Callable[[Any], bool]
    per_process: bool
    described: bool

    @property
    def admin(self) -> bool:
        """Needs an admin key."""
        return is_admin(self.path)

    @property
    def items(self) -> bool:
        """Reads or changes the items of the catalogue."""
        return self.path.startswith("/v1/items")

    @property
    def sharable(self) -> bool:
        """Is about what several servers have together if they share a catalogue."""
        return self.items or self.path.startswith("/admin/experiments")

    @property
    def text(self) -> bool:
        """The answer may take as long as a text."""
        return self.queue == TEXT

    def models(self, parameters: Mapping[str, str]) -> Models:
        """Returns the models of which one has the queue, for a path with these parameters."""
        if isinstance(self.queue, tuple):
            return self.queue
        return self.queue.get(parameters["name"], ())

    @overload
    def __get__(self, client: SyncApi, owner: type) -> Callable[P, A]: ...

    @overload
    def __get__(self, client: AsyncApi, owner: type) -> Callable[P, Coroutine[Any, Any, A]]: ...

    @overload
    def __get__(self, client: None, owner: type) -> Operation[P, A]: ...

    def __get__(self, client: object, owner: type) -> Any:
        """Returns the method of a client; the row itself as an attribute of the table."""
        if not issubclass(owner, SyncApi | AsyncApi):
            return self
        function = owner.method_of(self)
        return function if client is None else MethodType(function, client)


OPERATIONS: dict[str, Operation[Any, Any]] = {}
"""All rows by name, in the order of their declarations."""


def is_admin(path: str) -> bool:
    """Whether a path is an operator's. Such a path needs an admin key, with a route or without."""
    return path == ADMIN or path.startswith(f"{ADMIN}/")


def parameters_of(path: str) -> tuple[str, ...]:
    """Returns the names of the parameters of a path, in order."""
    return tuple(part.partition("}")[0].partition(":")[0] for part in path.split("{")[1:])


def operation(
    route: str,
    *,
    aliases: tuple[str, ...] = (),
    event: type[msgspec.Struct] | None = None,
    status: int = 200,
    invalid_status: int = 422,
    open: bool = False,
    counted: bool = True,
    queue: Models | Mapping[str, Models] = (),
    errors: tuple[str, ...] = (),
    repeatable: Callable[[Any], bool] = always,
    per_process: bool = False,
    described: bool = True,
) -> Callable[[Callable[Concatenate[Any, P], A]], Operation[P, A]]:
    """Declares an operation. The parameters of its path have the names of its arguments.

    Args:
        route: HTTP method and path.
        aliases: See Operation, like all other arguments.
    """

    def declare(declared: Callable[Concatenate[Any, P], A]) -> Operation[P, A]:
        method, path = route.split()
        types = get_type_hints(declared)
        row = Operation(
            declared=declared,
            name=declared.__name__,
            method=method,
            path=path,
            aliases=aliases,
            parameters=parameters_of(path),
            body=types.get("body"),
            query=types.get("query"),
            answer=types["return"],
            event=event,
            summary=(declared.__doc__ or "").partition("\n")[0],
            status=status,
            invalid_status=invalid_status,
            open=open,
            counted=counted and not open,
            queue=queue,
            errors=errors,
            repeatable=repeatable,
            per_process=per_process,
            described=described,
        )
        OPERATIONS[row.name] = row
        return row

    return declare


class Api:
    """The operations that clients call. Each takes its deadline in seconds."""

    @operation("POST /v1/recommend", queue=RECOMMENDER, errors=(*HISTORY, *BEHIND))
    def recommend(
        self, body: m.RecommendRequest, deadline_s: float | None = None
    ) -> m.RecommendResponse:
        """Returns the k best items for a user or a history."""

    @operation("POST /v1/similar")
    def similar(
        self, body: m.SimilarRequest, deadline_s: float | None = None
    ) -> m.RecommendResponse:
        """Returns the items that are most similar to given ones."""

    @operation("POST /v1/rank", queue=RANKER, errors=(*HISTORY, *BEHIND))
    def rank(self, body: m.RankRequest, deadline_s: float | None = None) -> m.RankResponse:
        """Returns the given candidates, best first."""

    @operation("POST /v1/rank:batch", queue=RANKER, errors=(*HISTORY, *BEHIND))
    def rank_batch(
        self, body: m.RankBatchRequest, deadline_s: float | None = None
    ) -> m.RankBatchResponse:
        """Returns one ranking per request; an error in one does not affect the others."""

    @operation("GET /v2")
    def server_metadata(self, deadline_s: float | None = None) -> i.ServerMetadata:
        """Returns name, version and extensions of the server."""

    @operation("GET /v2/models/stats")
    def all_statistics(self, deadline_s: float | None = None) -> i.Statistics:
        """Returns what this process has answered since it started, of all models."""

    @operation(
        "GET /v2/models/{name}",
        aliases=("/v2/models/{name}/versions/{version}",),
        errors=("unknown_model",),
    )
    def model_metadata(self, name: str, deadline_s: float | None = None) -> i.ModelMetadata:
        """Returns inputs and outputs of `recommend` or `rank`."""

    @operation(
        "GET /v2/models/{name}/ready",
        aliases=("/v2/models/{name}/versions/{version}/ready",),
        errors=("unknown_model",),
    )
    def model_ready(self, name: str, deadline_s: float | None = None) -> i.ModelReady:
        """Returns that a model takes requests; 404 if the bundle lacks it, 503 while loading."""

    @operation(
        "POST /v2/models/{name}/infer",
        aliases=("/v2/models/{name}/versions/{version}/infer",),
        queue={"recommend": RECOMMENDER, "rank": RANKER},
        errors=("unsupported", *HISTORY),
    )
    def infer(
        self, name: str, body: i.InferRequest, deadline_s: float | None = None
    ) -> i.InferResponse:
        """Recommends or ranks for up to 256 users, given and returned as tensors."""

    @operation(
        "GET /v2/models/{name}/config",
        aliases=("/v2/models/{name}/versions/{version}/config",),
        errors=("unknown_model",),
    )
    def model_config(self, name: str, deadline_s: float | None = None) -> i.ModelConfig:
        """Returns the configuration of a model in Triton's form."""

    @operation(
        "GET /v2/models/{name}/stats",
        aliases=("/v2/models/{name}/versions/{version}/stats",),
        errors=("unknown_model",),
    )
    def model_statistics(self, name: str, deadline_s: float | None = None) -> i.Statistics:
        """Returns what this process has answered with a model since it started."""

    @operation("POST /v1/events", errors=(*HISTORY, "experiment_not_saved"), repeatable=have_ids)
    def add_events(
        self, body: e.EventsRequest, deadline_s: float | None = None
    ) -> e.EventsResponse:
        """Stores events and corrections; the next answer takes them into account."""

    @operation("GET /v1/event-types")
    def event_types(self, deadline_s: float | None = None) -> e.EventTypesResponse:
        """Returns the names of the event types that events may have."""

    @operation("GET /v1/users", errors=("listing_unsupported", *HISTORY))
    def users(self, query: b.UsersQuery, deadline_s: float | None = None) -> b.UserPage:
        """Returns a page of the ids of users with stored events; `prefix`, `limit` and `after`."""

    @operation("GET /v1/users/{user_id:path}/history", errors=HISTORY)
    def history(self, user_id: AnyId, deadline_s: float | None = None) -> e.HistoryResponse:
        """Returns a user's events, oldest first."""

    @operation("DELETE /v1/users/{user_id:path}", status=204, errors=HISTORY)
    def delete_user(self, user_id: AnyId, deadline_s: float | None = None) -> None:
        """Deletes a user's stored events, cached prefixes and rows of the slate log."""

    @operation("GET /v1/items", errors=BEHIND)
    def items(self, query: b.ItemsQuery, deadline_s: float | None = None) -> b.ItemPage:
        """Returns a page of the catalogue, most popular items first, or the items of `ids`."""

    @operation("PUT /v1/items", errors=CHANGE, per_process=True)
    def put_items(self, body: m.ItemsRequest, deadline_s: float | None = None) -> m.ItemsResponse:
        """Inserts and updates items; the next answer takes them into account."""

    @operation(
        "POST /v1/items:rollback",
        errors=("unknown_catalog_version", *CHANGE),
        per_process=True,
    )
    def rollback_items(
        self, body: m.RollbackRequest, deadline_s: float | None = None
    ) -> m.RollbackResponse:
        """Restores the items of an earlier catalogue version."""

    @operation(
        "DELETE /v1/items/{item_id:path}",
        errors=("unknown_item", *CHANGE),
        repeatable=never,
        per_process=True,
    )
    def hide_item(self, item_id: AnyId, deadline_s: float | None = None) -> m.HideItemResponse:
        """Removes an item from all answers."""

    @operation("GET /v1/items/{item_id:path}", errors=("unknown_item", *BEHIND))
    def item(self, item_id: AnyId, deadline_s: float | None = None) -> m.ItemResponse:
        """Returns one item of the catalogue."""

    @operation("GET /v1/experiments")
    def experiments(self, deadline_s: float | None = None) -> x.ExperimentsResponse:
        """Returns the state of all experiments and of their arms."""

    @operation("POST /admin/experiments/{name}:stop", errors=EXPERIMENT, per_process=True)
    def stop_experiment(self, name: str, deadline_s: float | None = None) -> x.ExperimentStatus:
        """Stops an experiment: every request gets the control. Needs an admin key."""

    @operation("POST /admin/experiments/{name}:start", errors=EXPERIMENT, per_process=True)
    def start_experiment(self, name: str, deadline_s: float | None = None) -> x.ExperimentStatus:
        """Starts a stopped or fallen-back experiment again. Needs an admin key."""

    @operation("GET /v1/models")
    def models(self, deadline_s: float | None = None) -> Json:
        """Returns the served models in OpenAI's list format."""

    @operation("GET /v1/models/{name:path}", errors=("unknown_model",))
    def model(self, name: str, deadline_s: float | None = None) -> Json:
        """Returns one of the models."""

    @operation(
        "POST /v1/completions",
        event=t.CompletionResponse,
        queue=TEXT,
        errors=(*LANGUAGE, "unfit_draft", "constraint_failed"),
        invalid_status=400,
    )
    def complete(
        self, body: t.CompletionRequest, deadline_s: float | None = None
    ) -> t.CompletionResponse:
        """Continues a prompt."""

    @operation(
        "POST /v1/chat/completions",
        event=t.ChatChunk,
        queue=TEXT,
        errors=(*LANGUAGE, "unfit_draft", "constraint_failed"),
        invalid_status=400,
    )
    def chat(self, body: t.ChatRequest, deadline_s: float | None = None) -> t.ChatResponse:
        """Generates the assistant's next turn."""

    # vLLM's third name of the route, which litellm uses, is the alias.
    @operation(
        "POST /v1/rerank", aliases=("/rerank",), queue=TEXT, errors=LANGUAGE, invalid_status=400
    )
    def rerank(self, body: s.RerankRequest, deadline_s: float | None = None) -> s.RerankResponse:
        """Sorts documents by relevance to a query, in Jina's format."""

    @operation("POST /v2/rerank", queue=TEXT, errors=LANGUAGE)
    def rerank_v2(self, body: s.RerankRequest, deadline_s: float | None = None) -> s.RerankResponse:
        """Sorts documents by relevance to a query, in Cohere's format."""

    @operation("POST /generative_scoring", queue=TEXT, errors=LANGUAGE, invalid_status=400)
    def generative_scoring(
        self, body: s.GenerativeScoringRequest, deadline_s: float | None = None
    ) -> s.GenerativeScoringResponse:
        """Returns probabilities of label tokens after a query and each item."""

    @operation("POST /v1/embeddings", queue=TEXT, errors=LANGUAGE, invalid_status=400)
    def embeddings(
        self, body: c.EmbeddingsRequest, deadline_s: float | None = None
    ) -> c.EmbeddingsResponse:
        """Returns a vector per text: the mean of the model's final hidden states, of length 1."""

    @operation("POST /tokenize", errors=ENCODED)
    def tokenize(
        self, body: c.TokenizeRequest, deadline_s: float | None = None
    ) -> c.TokenizeResponse:
        """Returns the tokens of a text or of a chat's prompt, in vLLM's format."""

    @operation("GET /tokenizer_info", errors=LANGUAGE)
    def tokenizer_info(self, deadline_s: float | None = None) -> c.TokenizerInfo:
        """Returns the special tokens and the chat template of the language model, as vLLM does."""

    @operation("POST /detokenize", errors=ENCODED)
    def detokenize(
        self, body: c.DetokenizeRequest, deadline_s: float | None = None
    ) -> c.DetokenizeResponse:
        """Returns the text of tokens, in vLLM's format."""

    @operation("GET /version")
    def version(self, deadline_s: float | None = None) -> Json:
        """Returns the versions of the program, the models and the catalogue, and the kernels."""

    # Orchestrators probe without a key. The routes also have the names of vLLM and of `/v2`.
    @operation("GET /health/live", open=True)
    def live(self, deadline_s: float | None = None) -> Json:
        """Returns that the process runs."""

    @operation("GET /v2/health/live", open=True)
    def live_v2(self, deadline_s: float | None = None) -> Json:
        """Returns that the process runs."""

    @operation("GET /health", open=True)
    def health(self, deadline_s: float | None = None) -> Json:
        """Returns that the server takes requests; 503 while loading, draining, failed or hung."""

    @operation("GET /health/ready", open=True)
    def ready(self, deadline_s: float | None = None) -> Json:
        """Returns that the server takes requests; 503 while loading, draining, failed or hung."""

    @operation("GET /ping", open=True)
    def ping(self, deadline_s: float | None = None) -> Json:
        """Returns that the server takes requests; 503 while loading, draining, failed or hung."""

    @operation("GET /v2/health/ready", open=True)
    def ready_v2(self, deadline_s: float | None = None) -> Json:
        """Returns that the server takes requests; 503 while loading, draining, failed or hung."""

    @operation("GET /metrics", counted=False)
    def metrics(self, deadline_s: float | None = None) -> str:
        """Returns the metrics in the text format of Prometheus, or of OpenMetrics by `Accept`."""

    @operation(
        "POST /admin/bundle:load",
        status=202,
        errors=("unknown_bundle", "bundle_conflict", "catalog_unavailable"),
        repeatable=never,
        per_process=True,
    )
    def load_bundle(
        self, body: a.BundleLoadRequest, deadline_s: float | None = None
    ) -> a.BundleStatus:
        """Starts to load another bundle, on request on all servers of a fleet, one after another.

        The current one answers until it is ready.
        """

    @operation(
        "POST /admin/bundle:rollback",
        status=202,
        errors=("bundle_conflict",),
        repeatable=never,
        per_process=True,
    )
    def rollback_bundle(self, deadline_s: float | None = None) -> a.BundleStatus:
        """Starts to restore the previous bundle."""

    @operation("GET /admin/bundle")
    def bundle_status(self, deadline_s: float | None = None) -> a.BundleStatus:
        """Returns the current and the previous bundle, and the state of the latest load."""


class Pages:
    """The operations without a method of the clients: pages of a browser, a probe by POST."""

    @operation("POST /ping", open=True)
    def ping_post(self) -> Json:
        """Returns that the server takes requests, for Amazon SageMaker and callers of vLLM."""

    @operation("GET /openapi.json", described=False)
    def openapi(self) -> Json:
        """Returns the description of the API."""

    @operation("GET /", described=False)
    def playground(self) -> str:
        """Returns the playground."""

    @operation("GET /playground/samples", described=False)
    def samples(self) -> Json:
        """Returns sample users and items, for stores that list no users."""

    @operation("GET /playground/recent", counted=False, described=False)
    def recent(self) -> list[Any]:
        """Returns the metrics of the last ten minutes."""

    @operation("GET /playground/{name}", described=False)
    def static(self, name: str) -> str:
        """Returns a file of the playground."""


OPEN_PATHS = frozenset(row.path for row in OPERATIONS.values() if row.open)
"""Paths that need no key."""


class SyncApi(Api):
    """A client whose methods return the answer."""

    @classmethod
    def method_of(cls, operation: Operation[Any, Any]) -> Callable[..., Any]:
        """Returns the function that calls an operation; its first argument is the client."""
        raise NotImplementedError


class AsyncApi(Api):
    """A client whose methods return a coroutine of the answer."""

    @classmethod
    def method_of(cls, operation: Operation[Any, Any]) -> Callable[..., Any]:
        """Returns the function that calls an operation; its first argument is the client."""
        raise NotImplementedError
