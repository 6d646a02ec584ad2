"""Which errors each operation may answer with, for GET /openapi.json.

Refusals that depend on data, models or keys are listed here by operation; no schema can say them.
"""

from __future__ import annotations

from typing import Any

from recserve.server.errors import INTERNAL, ROUTING, TABLE, Row

HEALTH = ("live", "live_v2", "health", "ready", "ready_v2", "ping", "ping_post")
TEXTS = ("complete", "chat")
SCORES = ("rerank", "rerank_v2", "generative_scoring", "embeddings")
ITEMS = ("recommend", "rank", "rank_batch", "infer")
# Operations that the engine answers: they wait in its queue until their deadline.
ENGINE = (*ITEMS, *TEXTS, *SCORES)
TOKENS = ("tokenize", "detokenize", "tokenizer_info")
HISTORIES = (*ITEMS, "add_events", "history", "delete_user", "users")
ALWAYS = ("request_timeout", "headers_too_large", "internal", "not_ready", "too_many_connections")
KEYS = ("invalid_api_key", "cross_site")
BODY = ("malformed_body", "malformed_request", "body_too_large", "missing_field", "unknown_field")
OF_OPERATION: dict[str, tuple[str, ...]] = {
    "item": ("unknown_item",),
    "hide_item": ("unknown_item",),
    "rollback_items": ("unknown_catalog_version",),
    "model": ("unknown_model",),
    "model_metadata": ("unknown_model",),
    "model_ready": ("unknown_model",),
    "model_config": ("unknown_model",),
    "model_statistics": ("unknown_model",),
    "users": ("listing_unsupported",),
    "load_bundle": ("unknown_bundle", "bundle_conflict"),
    "rollback_bundle": ("bundle_conflict",),
    "stop_experiment": ("unknown_experiment",),
    "start_experiment": ("unknown_experiment",),
}


def error_codes(name: str, path: str, has_input: bool) -> list[str]:
    """Returns the codes of the errors of an operation.

    Args:
        name: The operation.
        path: Its path.
        has_input: Whether it reads a body or query parameters.
    """
    codes = [*ALWAYS, *OF_OPERATION.get(name, ())]
    if name not in HEALTH:
        codes += KEYS if name == "metrics" else (*KEYS, "quota_exceeded")
    if path.startswith("/admin/"):
        codes.append("admin_disabled")
    if has_input:
        codes += BODY
    if has_input or "{" in path or path.startswith("/admin/"):
        codes.append("out_of_range")
    if name in ENGINE:
        codes += ("unknown_model", "request_too_large", "queue_full", "deadline_exceeded")
    if name in (*TEXTS, *SCORES, *TOKENS):
        codes += ("unknown_model", "unsupported", "context_length_exceeded")
    if name in TEXTS:
        codes.append("unfit_draft")
    if name == "infer":
        codes.append("unsupported")
    if name in HISTORIES:
        codes += ("corrupt_history", "history_unavailable")
    if name in ("put_items", "hide_item", "rollback_items"):
        codes.append("items_read_only")
    return codes


def error_statuses(
    name: str, path: str, has_input: bool, error_schema: dict[str, Any]
) -> dict[str, Any]:
    """Returns the error responses of an operation by status, each with its codes.

    Args:
        name: The operation.
        path: Its path.
        has_input: Whether it reads a body or query parameters.
        error_schema: JSON schema of the error response.
    """
    rows: tuple[Row, ...] = (*TABLE.values(), *ROUTING.values(), INTERNAL)
    statuses: dict[int, list[str]] = {}
    for code in dict.fromkeys(error_codes(name, path, has_input)):
        status = next(row.status for row in rows if row.code == code)
        statuses.setdefault(status, []).append(code)
    content = {"application/json": {"schema": error_schema}}
    return {
        str(status): {"description": f"`code` is {' or '.join(codes)}.", "content": content}
        for status, codes in sorted(statuses.items())
    }
