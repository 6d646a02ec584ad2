"""The operations of the HTTP API as values: method, path, body, and the class of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar
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

T = TypeVar("T")
Json = dict[str, Any]


@dataclass(frozen=True)
class Operation(Generic[T]):
    """One request.

    Attributes:
        method: HTTP method.
        path: Path with encoded parameters.
        answer: Class of the answer. `str` is the body as text, None an answer without a body.
        body: The body; None without one.
        repeatable: False if a request that the server has begun must not be sent again.
    """

    method: str
    path: str
    answer: Any
    body: Any = None
    repeatable: bool = True

    def content(self) -> bytes | None:
        """Returns the body as JSON; None without one."""
        return None if self.body is None else ENCODER.encode(self.body)

    def read(self, content: bytes) -> T:
        """Decodes an answer."""
        if self.answer is None:
            return None  # type: ignore[return-value]
        if self.answer is str:
            return content.decode()  # type: ignore[return-value]
        found: T = msgspec.json.Decoder(self.answer, float_hook=exact_number).decode(content)
        return found


def _get(path: str, answer: type[T] | Any) -> Operation[T]:
    return Operation("GET", path, answer)


def _post(path: str, answer: type[T], body: Any, repeatable: bool = True) -> Operation[T]:
    return Operation("POST", path, answer, body, repeatable)


def _part(given: AnyId) -> str:
    """Encodes a path parameter, slashes too. An id of dots is no step in the path."""
    text = checked_id("id", given)
    return text.replace(".", "%2E") if text in (".", "..") else quote(text, safe="")


def _with_query(path: str, query: b.ItemsQuery | b.UsersQuery) -> str:
    """Returns a path with the fields of a query that differ from their defaults."""
    unset = type(query)()
    fields = msgspec.to_builtins(query)
    changed = {name: value for name, value in fields.items() if value != getattr(unset, name)}
    return f"{path}?{urlencode(changed)}" if changed else path


def recommend(body: m.RecommendRequest) -> Operation[m.RecommendResponse]:
    """POST /v1/recommend."""
    return _post("/v1/recommend", m.RecommendResponse, body)


def rank(body: m.RankRequest) -> Operation[m.RankResponse]:
    """POST /v1/rank."""
    return _post("/v1/rank", m.RankResponse, body)


def rank_batch(body: m.RankBatchRequest) -> Operation[m.RankBatchResponse]:
    """POST /v1/rank:batch."""
    return _post("/v1/rank:batch", m.RankBatchResponse, body)


def add_events(body: e.EventsRequest) -> Operation[e.EventsResponse]:
    """POST /v1/events; repeatable only if every event has an id."""
    named = all(event.event_id is not None for event in body.events)
    return _post("/v1/events", e.EventsResponse, body, repeatable=named)


def event_types() -> Operation[e.EventTypesResponse]:
    """GET /v1/event-types."""
    return _get("/v1/event-types", e.EventTypesResponse)


def history(user_id: AnyId) -> Operation[e.HistoryResponse]:
    """GET /v1/users/{user_id}/history."""
    return _get(f"/v1/users/{_part(user_id)}/history", e.HistoryResponse)


def delete_user(user_id: AnyId) -> Operation[None]:
    """DELETE /v1/users/{user_id}."""
    return Operation("DELETE", f"/v1/users/{_part(user_id)}", None)


def put_items(body: m.ItemsRequest) -> Operation[m.ItemsResponse]:
    """PUT /v1/items."""
    return Operation("PUT", "/v1/items", m.ItemsResponse, body)


def item(item_id: AnyId) -> Operation[m.ItemResponse]:
    """GET /v1/items/{item_id}."""
    return _get(f"/v1/items/{_part(item_id)}", m.ItemResponse)


def items(query: b.ItemsQuery) -> Operation[b.ItemPage]:
    """GET /v1/items."""
    return _get(_with_query("/v1/items", query), b.ItemPage)


def users(query: b.UsersQuery) -> Operation[b.UserPage]:
    """GET /v1/users."""
    return _get(_with_query("/v1/users", query), b.UserPage)


def hide_item(item_id: AnyId) -> Operation[m.HideItemResponse]:
    """DELETE /v1/items/{item_id}."""
    return Operation("DELETE", f"/v1/items/{_part(item_id)}", m.HideItemResponse, repeatable=False)


def rollback_items(body: m.RollbackRequest) -> Operation[m.RollbackResponse]:
    """POST /v1/items:rollback."""
    return _post("/v1/items:rollback", m.RollbackResponse, body)


def complete(body: t.CompletionRequest) -> Operation[t.CompletionResponse]:
    """POST /v1/completions."""
    return _post("/v1/completions", t.CompletionResponse, body)


def chat(body: t.ChatRequest) -> Operation[t.ChatResponse]:
    """POST /v1/chat/completions."""
    return _post("/v1/chat/completions", t.ChatResponse, body)


def stream_completion(body: t.CompletionRequest) -> Operation[t.CompletionResponse]:
    """POST /v1/completions with `stream`; the answer is one chunk."""
    streamed = msgspec.structs.replace(body, stream=True)
    return _post("/v1/completions", t.CompletionResponse, streamed)


def stream_chat(body: t.ChatRequest) -> Operation[t.ChatChunk]:
    """POST /v1/chat/completions with `stream`; the answer is one chunk."""
    streamed = msgspec.structs.replace(body, stream=True)
    return _post("/v1/chat/completions", t.ChatChunk, streamed)


def rerank(body: s.RerankRequest) -> Operation[s.RerankResponse]:
    """POST /v1/rerank."""
    return _post("/v1/rerank", s.RerankResponse, body)


def rerank_v2(body: s.RerankRequest) -> Operation[s.RerankResponse]:
    """POST /v2/rerank."""
    return _post("/v2/rerank", s.RerankResponse, body)


def generative_scoring(
    body: s.GenerativeScoringRequest,
) -> Operation[s.GenerativeScoringResponse]:
    """POST /generative_scoring."""
    return _post("/generative_scoring", s.GenerativeScoringResponse, body)


def embeddings(body: c.EmbeddingsRequest) -> Operation[c.EmbeddingsResponse]:
    """POST /v1/embeddings."""
    return _post("/v1/embeddings", c.EmbeddingsResponse, body)


def tokenize(body: c.TokenizeRequest) -> Operation[c.TokenizeResponse]:
    """POST /tokenize."""
    return _post("/tokenize", c.TokenizeResponse, body)


def detokenize(body: c.DetokenizeRequest) -> Operation[c.DetokenizeResponse]:
    """POST /detokenize."""
    return _post("/detokenize", c.DetokenizeResponse, body)


def tokenizer_info() -> Operation[c.TokenizerInfo]:
    """GET /tokenizer_info."""
    return _get("/tokenizer_info", c.TokenizerInfo)


def models() -> Operation[Json]:
    """GET /v1/models."""
    return _get("/v1/models", Json)


def model(name: str) -> Operation[Json]:
    """GET /v1/models/{name}."""
    return _get(f"/v1/models/{_part(name)}", Json)


def version() -> Operation[Json]:
    """GET /version."""
    return _get("/version", Json)


def health(path: str) -> Operation[Json]:
    """GET of one of the health routes."""
    return _get(path, Json)


def metrics() -> Operation[str]:
    """GET /metrics."""
    return _get("/metrics", str)


def server_metadata() -> Operation[i.ServerMetadata]:
    """GET /v2."""
    return _get("/v2", i.ServerMetadata)


def model_metadata(name: str) -> Operation[i.ModelMetadata]:
    """GET /v2/models/{name}."""
    return _get(f"/v2/models/{_part(name)}", i.ModelMetadata)


def model_ready(name: str) -> Operation[i.ModelReady]:
    """GET /v2/models/{name}/ready."""
    return _get(f"/v2/models/{_part(name)}/ready", i.ModelReady)


def infer(name: str, body: i.InferRequest) -> Operation[i.InferResponse]:
    """POST /v2/models/{name}/infer."""
    return _post(f"/v2/models/{_part(name)}/infer", i.InferResponse, body)


def load_bundle(body: a.BundleLoadRequest) -> Operation[a.BundleStatus]:
    """POST /admin/bundle:load."""
    return _post("/admin/bundle:load", a.BundleStatus, body, repeatable=False)


def rollback_bundle() -> Operation[a.BundleStatus]:
    """POST /admin/bundle:rollback."""
    return _post("/admin/bundle:rollback", a.BundleStatus, None, repeatable=False)


def bundle_status() -> Operation[a.BundleStatus]:
    """GET /admin/bundle."""
    return _get("/admin/bundle", a.BundleStatus)


def experiments() -> Operation[x.ExperimentsResponse]:
    """GET /v1/experiments."""
    return _get("/v1/experiments", x.ExperimentsResponse)


def stop_experiment(name: str) -> Operation[x.ExperimentStatus]:
    """POST /admin/experiments/{name}:stop."""
    return _post(f"/admin/experiments/{_part(name)}:stop", x.ExperimentStatus, None)


def start_experiment(name: str) -> Operation[x.ExperimentStatus]:
    """POST /admin/experiments/{name}:start."""
    return _post(f"/admin/experiments/{_part(name)}:start", x.ExperimentStatus, None)
