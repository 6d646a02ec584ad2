"""Which errors each operation may answer with, for GET /openapi.json."""

from __future__ import annotations

from typing import Any

from recserve.server.errors import INTERNAL, ROUTING, TABLE, Row

HEALTH = ("live", "live_v2", "health", "ready", "ready_v2", "ping")
# Operations that the engine answers: they wait in its queue until their deadline.
ENGINE = (
    *("recommend", "rank", "rank_batch", "infer", "complete", "chat", "rerank", "rerank_v2"),
    *("generative_scoring", "embeddings"),
)
ALWAYS = (408, 431, 500, 503)


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
    content = {"application/json": {"schema": error_schema}}
    statuses = set(ALWAYS)
    if name not in HEALTH:
        statuses |= {401, 403}
    if has_input:
        statuses |= {400, 413, 422}
    if "{" in path or name in ENGINE or path.startswith("/admin/"):
        statuses |= {404, 422}
    if path.startswith("/admin/bundle"):
        statuses.add(409)
    if name in ENGINE:
        statuses |= {429, 504}
    if name == "users":
        statuses.add(501)
    return {
        str(status): {"description": _codes(status), "content": content}
        for status in sorted(statuses)
    }


def _codes(status: int) -> str:
    rows: tuple[Row, ...] = (*TABLE.values(), *ROUTING.values(), INTERNAL)
    codes = dict.fromkeys(row.code for row in rows if row.status == status)
    return f"`code` is {' or '.join(codes)}."
