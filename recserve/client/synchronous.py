"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypeVar

import httpx

from recserve.client import operations
from recserve.client.attempts import Attempts, ClientOptions, chunk, event_data
from recserve.client.operations import Json, Operation
from recserve.schemas.admin import BundleLoadRequest, BundleStatus
from recserve.schemas.browse import ItemPage, ItemsQuery, UserPage, UsersQuery
from recserve.schemas.encoding import (
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingsRequest,
    EmbeddingsResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from recserve.schemas.events import (
    EventsRequest,
    EventsResponse,
    EventTypesResponse,
    HistoryResponse,
)
from recserve.schemas.experiments import ExperimentsResponse, ExperimentStatus
from recserve.schemas.inference import (
    InferRequest,
    InferResponse,
    ModelMetadata,
    ModelReady,
    ServerMetadata,
)
from recserve.schemas.items import (
    HideItemResponse,
    ItemResponse,
    ItemsRequest,
    ItemsResponse,
    RankBatchRequest,
    RankBatchResponse,
    RankRequest,
    RankResponse,
    RecommendRequest,
    RecommendResponse,
    RollbackRequest,
    RollbackResponse,
)
from recserve.schemas.scoring import (
    GenerativeScoringRequest,
    GenerativeScoringResponse,
    RerankRequest,
    RerankResponse,
)
from recserve.schemas.shorthand import AnyId
from recserve.schemas.text import (
    ChatChunk,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
)

T = TypeVar("T")


class Client:
    """Calls a recserve server. It may be used from several threads.

    Each operation of the HTTP API has a method of the same name. Bodies and answers are the classes
    of `recserve.schemas`. Every method takes `deadline_s`, the time for its answer with all
    attempts; the server gets it as `X-Deadline-Ms`. Answers 429 and 503 are retried.

    Raises:
        ApiError: If the server answers with an error.
        DeadlinePassed: If there is no answer within the deadline.
        httpx.TransportError: If the connection fails.
    """

    def __init__(
        self,
        url: str,
        options: ClientOptions | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Opens no connection yet.

        Args:
            url: Address of the server, such as `http://127.0.0.1:8080`.
            options: Keys, deadlines and retries; None means the defaults.
            transport: Transport of httpx, for proxies and tests.
        """
        self.options = options or ClientOptions()
        limits = httpx.Limits(max_connections=self.options.connections)
        self._http = httpx.Client(base_url=url, limits=limits, transport=transport)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, operation: Operation[T], deadline_s: float | None = None) -> T:
        """Sends any operation and returns its answer."""
        attempts = Attempts(operation, self.options, deadline_s)
        while True:
            try:
                response = self._http.request(**attempts.request())
            except httpx.ConnectError as error:
                wait_s = attempts.unreachable(error)
            except httpx.TimeoutException:
                raise attempts.late() from None
            else:
                if response.is_success:
                    return operation.read(response.content)
                wait_s = attempts.refused(response.status_code, response.headers, response.content)
            time.sleep(wait_s)

    def stream(self, operation: Operation[T], deadline_s: float | None = None) -> Iterator[T]:
        """Sends an operation with a stream as its answer, and yields the chunks."""
        attempts = Attempts(operation, self.options, deadline_s)
        while True:
            try:
                with self._http.stream(**attempts.request()) as response:
                    if response.is_success:
                        for line in response.iter_lines():
                            if (data := event_data(line)) is not None:
                                yield chunk(operation, data)
                        return
                    content = response.read()
                wait_s = attempts.refused(response.status_code, response.headers, content)
            except httpx.ConnectError as error:
                wait_s = attempts.unreachable(error)
            except httpx.TimeoutException:
                raise attempts.late() from None
            time.sleep(wait_s)

    def recommend(
        self, body: RecommendRequest, deadline_s: float | None = None
    ) -> RecommendResponse:
        """Returns the k best items for a user or a history."""
        return self.send(operations.recommend(body), deadline_s)

    def rank(self, body: RankRequest, deadline_s: float | None = None) -> RankResponse:
        """Returns the given candidates, best first."""
        return self.send(operations.rank(body), deadline_s)

    def rank_batch(
        self, body: RankBatchRequest, deadline_s: float | None = None
    ) -> RankBatchResponse:
        """Returns one ranking or error per request."""
        return self.send(operations.rank_batch(body), deadline_s)

    def add_events(self, body: EventsRequest, deadline_s: float | None = None) -> EventsResponse:
        """Stores events and corrections."""
        return self.send(operations.add_events(body), deadline_s)

    def event_types(self, deadline_s: float | None = None) -> EventTypesResponse:
        """Returns the names of the event types that events may have."""
        return self.send(operations.event_types(), deadline_s)

    def history(self, user_id: AnyId, deadline_s: float | None = None) -> HistoryResponse:
        """Returns a user's events, oldest first."""
        return self.send(operations.history(user_id), deadline_s)

    def delete_user(self, user_id: AnyId, deadline_s: float | None = None) -> None:
        """Deletes a user's stored events."""
        self.send(operations.delete_user(user_id), deadline_s)

    def put_items(self, body: ItemsRequest, deadline_s: float | None = None) -> ItemsResponse:
        """Inserts and updates items."""
        return self.send(operations.put_items(body), deadline_s)

    def item(self, item_id: AnyId, deadline_s: float | None = None) -> ItemResponse:
        """Returns one item of the catalogue."""
        return self.send(operations.item(item_id), deadline_s)

    def items(self, query: ItemsQuery, deadline_s: float | None = None) -> ItemPage:
        """Returns a page of the catalogue, most popular items first."""
        return self.send(operations.items(query), deadline_s)

    def users(self, query: UsersQuery, deadline_s: float | None = None) -> UserPage:
        """Returns a page of the ids of users with stored events."""
        return self.send(operations.users(query), deadline_s)

    def hide_item(self, item_id: AnyId, deadline_s: float | None = None) -> HideItemResponse:
        """Removes an item from all answers."""
        return self.send(operations.hide_item(item_id), deadline_s)

    def rollback_items(
        self, body: RollbackRequest, deadline_s: float | None = None
    ) -> RollbackResponse:
        """Restores the items of an earlier catalogue version."""
        return self.send(operations.rollback_items(body), deadline_s)

    def complete(
        self, body: CompletionRequest, deadline_s: float | None = None
    ) -> CompletionResponse:
        """Continues a prompt."""
        return self.send(operations.complete(body), deadline_s)

    def chat(self, body: ChatRequest, deadline_s: float | None = None) -> ChatResponse:
        """Generates the assistant's next turn."""
        return self.send(operations.chat(body), deadline_s)

    def rerank(self, body: RerankRequest, deadline_s: float | None = None) -> RerankResponse:
        """Sorts documents by relevance, in Jina's format."""
        return self.send(operations.rerank(body), deadline_s)

    def rerank_v2(self, body: RerankRequest, deadline_s: float | None = None) -> RerankResponse:
        """Sorts documents by relevance, in Cohere's format."""
        return self.send(operations.rerank_v2(body), deadline_s)

    def generative_scoring(
        self, body: GenerativeScoringRequest, deadline_s: float | None = None
    ) -> GenerativeScoringResponse:
        """Returns probabilities of label tokens after a query and each item."""
        return self.send(operations.generative_scoring(body), deadline_s)

    def embeddings(
        self, body: EmbeddingsRequest, deadline_s: float | None = None
    ) -> EmbeddingsResponse:
        """Returns a vector for each text."""
        return self.send(operations.embeddings(body), deadline_s)

    def tokenize(self, body: TokenizeRequest, deadline_s: float | None = None) -> TokenizeResponse:
        """Returns the tokens of a text or of a chat's prompt."""
        return self.send(operations.tokenize(body), deadline_s)

    def detokenize(
        self, body: DetokenizeRequest, deadline_s: float | None = None
    ) -> DetokenizeResponse:
        """Returns the text of tokens."""
        return self.send(operations.detokenize(body), deadline_s)

    def tokenizer_info(self, deadline_s: float | None = None) -> TokenizerInfo:
        """Returns the special tokens and the chat template of the language model."""
        return self.send(operations.tokenizer_info(), deadline_s)

    def models(self, deadline_s: float | None = None) -> Json:
        """Returns the served models."""
        return self.send(operations.models(), deadline_s)

    def model(self, name: str, deadline_s: float | None = None) -> Json:
        """Returns one of the models."""
        return self.send(operations.model(name), deadline_s)

    def version(self, deadline_s: float | None = None) -> Json:
        """Returns the versions of program, models and catalogue."""
        return self.send(operations.version(), deadline_s)

    def metrics(self, deadline_s: float | None = None) -> str:
        """Returns the metrics in the text format of Prometheus."""
        return self.send(operations.metrics(), deadline_s)

    def server_metadata(self, deadline_s: float | None = None) -> ServerMetadata:
        """Returns name and version of the server."""
        return self.send(operations.server_metadata(), deadline_s)

    def model_metadata(self, name: str, deadline_s: float | None = None) -> ModelMetadata:
        """Returns inputs and outputs of `recommend` or `rank`."""
        return self.send(operations.model_metadata(name), deadline_s)

    def model_ready(self, name: str, deadline_s: float | None = None) -> ModelReady:
        """Returns whether a model takes requests. Raises ApiError if not."""
        return self.send(operations.model_ready(name), deadline_s)

    def load_bundle(self, body: BundleLoadRequest, deadline_s: float | None = None) -> BundleStatus:
        """Starts to load another bundle."""
        return self.send(operations.load_bundle(body), deadline_s)

    def rollback_bundle(self, deadline_s: float | None = None) -> BundleStatus:
        """Starts to restore the previous bundle."""
        return self.send(operations.rollback_bundle(), deadline_s)

    def bundle_status(self, deadline_s: float | None = None) -> BundleStatus:
        """Returns the served bundle and the latest replacement."""
        return self.send(operations.bundle_status(), deadline_s)

    def infer(
        self, name: str, body: InferRequest, deadline_s: float | None = None
    ) -> InferResponse:
        """Recommends or ranks for several users, given and returned as tensors."""
        return self.send(operations.infer(name, body), deadline_s)

    def experiments(self, deadline_s: float | None = None) -> ExperimentsResponse:
        """Returns the state of all experiments and of their arms."""
        return self.send(operations.experiments(), deadline_s)

    def stop_experiment(self, name: str, deadline_s: float | None = None) -> ExperimentStatus:
        """Stops an experiment: every request gets the control. Needs an admin key."""
        return self.send(operations.stop_experiment(name), deadline_s)

    def start_experiment(self, name: str, deadline_s: float | None = None) -> ExperimentStatus:
        """Starts a stopped or fallen-back experiment again. Needs an admin key."""
        return self.send(operations.start_experiment(name), deadline_s)

    def live(self, deadline_s: float | None = None) -> Json:
        """Returns if the process runs (`/health/live`). Raises ApiError if not."""
        return self.send(operations.health("/health/live"), deadline_s)

    def live_v2(self, deadline_s: float | None = None) -> Json:
        """Returns if the process runs (`/v2/health/live`). Raises ApiError if not."""
        return self.send(operations.health("/v2/health/live"), deadline_s)

    def ping(self, deadline_s: float | None = None) -> Json:
        """Returns if the server takes requests (`/ping`). Raises ApiError if not."""
        return self.send(operations.health("/ping"), deadline_s)

    def health(self, deadline_s: float | None = None) -> Json:
        """Returns if the server takes requests (`/health`). Raises ApiError if not."""
        return self.send(operations.health("/health"), deadline_s)

    def ready(self, deadline_s: float | None = None) -> Json:
        """Returns if the server takes requests (`/health/ready`). Raises ApiError if not."""
        return self.send(operations.health("/health/ready"), deadline_s)

    def ready_v2(self, deadline_s: float | None = None) -> Json:
        """Returns if the server takes requests (`/v2/health/ready`). Raises ApiError if not."""
        return self.send(operations.health("/v2/health/ready"), deadline_s)

    def stream_completion(
        self, body: CompletionRequest, deadline_s: float | None = None
    ) -> Iterator[CompletionResponse]:
        """Yields the pieces of a text while the server generates them."""
        return self.stream(operations.stream_completion(body), deadline_s)

    def stream_chat(
        self, body: ChatRequest, deadline_s: float | None = None
    ) -> Iterator[ChatChunk]:
        """Yields the pieces of a text while the server generates them."""
        return self.stream(operations.stream_chat(body), deadline_s)
