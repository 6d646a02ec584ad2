"""Compares requests with an OpenAPI description."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
from jsonschema import Draft202012Validator


def operations(described: dict[str, Any]) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Method, path template and description of each operation, by its id."""
    return {
        operation["operationId"]: (method.upper(), path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }


def misfits(described: dict[str, Any], name: str, request: httpx.Request) -> list[str]:
    """What a request has that the operation of this id does not allow."""
    method, path, operation = operations(described)[name]
    pattern = re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(path))
    sent = request.url.raw_path.decode()
    wrong = []
    if request.method != method or not re.fullmatch(pattern, sent):
        wrong.append(f"{request.method} {sent} is not {method} {path}")
    body = operation.get("requestBody")
    if (body is None) != (not request.content):
        wrong.append(f"{name}: a body is sent or missing")
    if body is not None and request.content:
        schema = body["content"]["application/json"]["schema"]
        whole = {**schema, "components": described["components"]}
        errors = Draft202012Validator(whole).iter_errors(json.loads(request.content))
        wrong += [f"{name}: {error.message}" for error in errors]
    return wrong
