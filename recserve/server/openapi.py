"""Builds GET /openapi.json from the framework's description and the messages' own schemas.

Routes decode raw bodies themselves for speed, so the framework does not know their schemas.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from recserve.bounds import END_S, FIRST_S, UNITS_PER_S
from recserve.schemas import admin as a
from recserve.schemas import browse as b
from recserve.schemas import encoding as c
from recserve.schemas import events as e
from recserve.schemas import experiments as x
from recserve.schemas import inference as i
from recserve.schemas import items as m
from recserve.schemas import scoring as s
from recserve.schemas import text as t
from recserve.schemas.rules import add_rules
from recserve.server.errors import is_inference
from recserve.server.openapi_errors import error_statuses
from recserve.speculation.sampling_params import MIN_TEMPERATURE

BODIES = {
    "recommend": m.RecommendRequest,
    "rank": m.RankRequest,
    "rank_batch": m.RankBatchRequest,
    "add_events": e.EventsRequest,
    "put_items": m.ItemsRequest,
    "rollback_items": m.RollbackRequest,
    "complete": t.CompletionRequest,
    "chat": t.ChatRequest,
    "rerank": s.RerankRequest,
    "rerank_v2": s.RerankRequest,
    "generative_scoring": s.GenerativeScoringRequest,
    "embeddings": c.EmbeddingsRequest,
    "tokenize": c.TokenizeRequest,
    "detokenize": c.DetokenizeRequest,
    "load_bundle": a.BundleLoadRequest,
    "infer": i.InferRequest,
}
QUERIES: dict[str, type[msgspec.Struct]] = {"items": b.ItemsQuery, "users": b.UsersQuery}
ANSWERS = {
    "items": b.ItemPage,
    "users": b.UserPage,
    "recommend": m.RecommendResponse,
    "rank": m.RankResponse,
    "rank_batch": m.RankBatchResponse,
    "add_events": e.EventsResponse,
    "complete": t.CompletionResponse,
    "chat": t.ChatResponse,
    "rerank": s.RerankResponse,
    "rerank_v2": s.RerankResponse,
    "generative_scoring": s.GenerativeScoringResponse,
    "embeddings": c.EmbeddingsResponse,
    "tokenize": c.TokenizeResponse,
    "detokenize": c.DetokenizeResponse,
    "tokenizer_info": c.TokenizerInfo,
    "event_types": e.EventTypesResponse,
    "history": e.HistoryResponse,
    "item": m.ItemResponse,
    "put_items": m.ItemsResponse,
    "hide_item": m.HideItemResponse,
    "rollback_items": m.RollbackResponse,
    "experiments": x.ExperimentsResponse,
    "stop_experiment": x.ExperimentStatus,
    "start_experiment": x.ExperimentStatus,
    "server_metadata": i.ServerMetadata,
    "model_metadata": i.ModelMetadata,
    "model_ready": i.ModelReady,
    "model_config": i.ModelConfig,
    "model_statistics": i.Statistics,
    "all_statistics": i.Statistics,
    "infer": i.InferResponse,
    "load_bundle": a.BundleStatus,
    "rollback_bundle": a.BundleStatus,
    "bundle_status": a.BundleStatus,
}
# Each event of a stream is one of these; the last one is [DONE].
STREAMS = {"complete": t.CompletionResponse, "chat": t.ChatChunk}
STATUS = {"load_bundle": "202", "rollback_bundle": "202"}


def describe(app: FastAPI) -> dict[str, Any]:
    """Returns the OpenAPI description of the application."""
    said = get_openapi(title=app.title, version=app.version, routes=app.routes)
    errors = (m.ErrorResponse, i.InferError)
    kinds = [*BODIES.values(), *ANSWERS.values(), *STREAMS.values(), *errors, m.ItemInput]
    kinds = list(dict.fromkeys(kinds))
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    by_kind = dict(zip(kinds, schemas, strict=True))
    _complete(components)
    said["components"] = {"schemas": components}
    add_rules(components, MIN_TEMPERATURE)
    for path, operations in said["paths"].items():
        for operation in operations.values():
            name = operation["operationId"]
            if "description" in operation:
                operation["description"] = inspect.cleandoc(operation["description"])
            if name in BODIES:
                content = {"application/json": {"schema": by_kind[BODIES[name]]}}
                operation["requestBody"] = {"required": True, "content": content}
            if name in QUERIES:
                operation["parameters"] = _parameters(QUERIES[name])
            error = by_kind[i.InferError if is_inference(path) else m.ErrorResponse]
            operation["responses"] = {
                **error_statuses(name, path, name in BODIES or name in QUERIES, error),
                "default": {
                    "description": "Error.",
                    "content": {"application/json": {"schema": error}},
                },
            }
            if name == "delete_user":
                operation["responses"]["204"] = {"description": "Deleted."}
                continue
            answered: dict[str, Any] = {"description": "Success."}
            if name in ANSWERS:
                answered["content"] = {"application/json": {"schema": by_kind[ANSWERS[name]]}}
            if name in STREAMS:
                event = _event(by_kind[STREAMS[name]], error)
                answered["content"] |= {"text/event-stream": {"schema": event}}
            operation["responses"][STATUS.get(name, "200")] = answered
    return said


def _event(chunk: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a server-sent event of a stream of chunks."""
    written = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [chunk, error]}}
    return {
        "description": "One event. The last one has the data [DONE].",
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, written]}},
    }


def _time_number() -> dict[str, Any]:
    """Returns the schema of a number in the place of a time: the ranges of all units."""
    units = list(UNITS_PER_S.values())
    gaps = [
        {"minimum": END_S * unit, "exclusiveMaximum": FIRST_S * larger}
        for unit, larger in pairwise(units)
    ]
    return {
        "type": "number",
        "minimum": FIRST_S * units[0],
        "exclusiveMaximum": END_S * units[-1],
        "not": {"anyOf": gaps},
    }


TIME_NUMBER = _time_number()


def _complete(schema: Any) -> None:
    """Writes schemas as generators of clients expect them; the meaning stays.

    - An array has `items` or `prefixItems`.
    - `items: false` is left out beside `maxItems`, which says the same.
    - A text for which a number may stand is one of two types.
    """
    if isinstance(schema, dict):
        if m.OR_TYPE in schema:
            text = dict(schema)
            schema.clear()
            kind = text.pop(m.OR_TYPE)
            schema["anyOf"] = [text, TIME_NUMBER if kind == m.TIME else {"type": kind}]
        if schema.get("items") is False and "maxItems" in schema:
            del schema["items"]
        if schema.get("type") == "array" and "prefixItems" not in schema:
            schema.setdefault("items", {})
        schema = list(schema.values())
    for inner in schema if isinstance(schema, list) else ():
        _complete(inner)


def _parameters(query: type[msgspec.Struct]) -> list[dict[str, Any]]:
    """Returns the query parameters of a route, one for each field."""
    (_,), components = msgspec.json.schema_components([query])
    schema = components[query.__name__]
    _complete(schema)
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": own}
        | ({"style": "form", "explode": False} if name in b.LISTS else {})
        for name, own in schema["properties"].items()
    ]
