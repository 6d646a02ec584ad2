"""Builds GET /openapi.json from the table of operations and the schemas of their messages.

Refusals that depend on data, models or keys are listed by operation; no schema can say them.
Routes that a program has added to the application are described by the framework.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from recserve.bounds import END_S, FIRST_S, UNITS_PER_S
from recserve.schemas import inference as i
from recserve.schemas import items as m
from recserve.schemas.api import OPERATIONS, Operation
from recserve.schemas.browse import LISTS
from recserve.schemas.rules import add_rules
from recserve.server.errors import INTERNAL, ROUTING, TABLE, Row, is_inference
from recserve.service.errors import INVALID_STATUS
from recserve.speculation.sampling_params import MIN_TEMPERATURE

Schema = dict[str, Any]
# Groups of operations by the start of their paths; the first that fits counts.
TAGS = {
    "/v1/recommend": "Recommend and rank",
    "/v1/rank": "Recommend and rank",
    "/v1/items": "Items",
    "/v1/events": "Events and users",
    "/v1/event-types": "Events and users",
    "/v1/users": "Events and users",
    "/v1/experiments": "Experiments",
    "/admin/experiments": "Experiments",
    "/admin": "Operation",
    "/v2/rerank": "Text",
    "/v2/health": "Operation",
    "/v2": "Open Inference Protocol",
    "/health": "Operation",
    "/ping": "Operation",
    "/metrics": "Operation",
    "/version": "Operation",
    "/": "Text",
}
SECURITY: Schema = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "A key of the setting `api_keys`, or of `admin_keys` below /admin. A server "
        "without keys takes requests without one.",
    },
    "basic": {"type": "http", "scheme": "basic", "description": "Any name, a key as password."},
}
# Codes of errors: of every request, of those with a key, a body or query, a queue.
ALWAYS = ("request_timeout", "headers_too_large", "internal", "not_ready", "too_many_connections")
KEYS = ("invalid_api_key", "cross_site")
INPUT = (
    *("malformed_body", "malformed_request", "body_too_large", "unsupported_encoding"),
    *("missing_field", "unknown_field"),
)
ENGINE = ("unknown_model", "request_too_large", "queue_full", "deadline_exceeded")


def describe(app: FastAPI) -> Schema:
    """Returns the OpenAPI description of the application."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    rows = [row for row in OPERATIONS.values() if row.described]
    types = [row.body for row in rows] + [row.answer for row in rows] + [row.event for row in rows]
    structs = [one for one in types if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    kinds: list[type] = list(dict.fromkeys([*structs, m.ErrorResponse, i.InferError, m.ItemInput]))
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    by_kind: dict[type, Schema] = dict(zip(kinds, schemas, strict=True))
    _complete(components)
    add_rules(components, MIN_TEMPERATURE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    document["components"]["securitySchemes"] = SECURITY
    document["servers"] = [{"url": "/"}]
    document["tags"] = [{"name": name} for name in dict.fromkeys(TAGS.values())]
    for row in rows:
        path = document["paths"].setdefault(row.path.replace(":path}", "}"), {})
        path[row.method.lower()] = _operation(row, by_kind)
    return document


def _operation(row: Operation[Any, Any], by_kind: dict[type, Schema]) -> Schema:
    """Returns the description of an operation."""
    described: Schema = {
        "summary": row.name.replace("_", " ").title(),
        "description": row.summary,
        "operationId": row.name,
        "tags": [next(tag for start, tag in TAGS.items() if row.path.startswith(start))],
        "security": [{}] if row.open else [{"key": []}, {"basic": []}, {}],
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in row.parameters
    ]
    if row.query is not None:
        parameters += _parameters(row.query)
    if parameters:
        described["parameters"] = parameters
    if row.body is not None:
        content = {"application/json": {"schema": by_kind[row.body]}}
        described["requestBody"] = {"required": True, "content": content}
    error = by_kind[i.InferError if is_inference(row.path) else m.ErrorResponse]
    refused = {"application/json": {"schema": error}}
    described["responses"] = {
        **error_statuses(row, error),
        "default": {"description": "Error.", "content": refused},
        str(row.status): _success(row, by_kind, error),
    }
    return described


def _success(row: Operation[Any, Any], by_kind: dict[type, Schema], error: Schema) -> Schema:
    """Returns the description of an answer that is no error."""
    if row.answer is type(None):
        return {"description": "Deleted."}
    described: Schema = {"description": "Success."}
    if row.answer in by_kind:
        described["content"] = {"application/json": {"schema": by_kind[row.answer]}}
    if row.event is not None:
        event = _event(by_kind[row.event], error)
        described["content"]["text/event-stream"] = {"schema": event}
    return described


def error_codes(row: Operation[Any, Any]) -> list[str]:
    """Returns the codes of the errors of an operation, each once."""
    has_input = row.body is not None or row.query is not None
    codes = [*ALWAYS]
    if not row.open:
        codes += KEYS
    if row.admin:
        codes.append("admin_disabled")
    else:
        if row.counted:
            codes.append("quota_exceeded")
        if not row.open:
            codes.append("queue_full")  # of the calls that wait for a thread, if not of the engine
    if has_input:
        codes += INPUT
    if has_input or row.parameters or row.admin:
        codes.append("out_of_range")
    if row.queue:
        codes += ENGINE
    return list(dict.fromkeys([*codes, *row.errors]))


def error_statuses(row: Operation[Any, Any], error_schema: Schema) -> Schema:
    """Returns the error responses of an operation by status, each with its codes.

    Args:
        row: The operation.
        error_schema: JSON schema of the error response.
    """
    known: tuple[Row, ...] = (*TABLE.values(), *ROUTING.values(), INTERNAL)
    statuses: dict[int, list[str]] = {}
    for code in error_codes(row):
        status = next(one.status for one in known if one.code == code)
        status = row.invalid_status if status == INVALID_STATUS else status
        statuses.setdefault(status, []).append(code)
    content = {"application/json": {"schema": error_schema}}
    return {
        str(status): {"description": f"`code` is {' or '.join(codes)}.", "content": content}
        for status, codes in sorted(statuses.items())
    }


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
    - The mark of token ids is left out.
    """
    if isinstance(schema, dict):
        if m.OR_TYPE in schema:
            text = dict(schema)
            schema.clear()
            kind = text.pop(m.OR_TYPE)
            schema["anyOf"] = [text, TIME_NUMBER if kind == m.TIME else {"type": kind}]
        schema.pop(m.TOKEN_ID, None)
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
        | ({"style": "form", "explode": False} if name in LISTS else {})
        for name, own in schema["properties"].items()
    ]
