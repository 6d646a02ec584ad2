"""GET /openapi.json: the framework's description, with the messages' own schemas put in.

Routes read raw bodies, which makes them quick, so the framework cannot know what is in them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from recserve.schemas import events as e
from recserve.schemas import items as m
from recserve.schemas import scoring as s
from recserve.schemas import text as t

BODIES = {
    "recommend": m.RecommendBody,
    "rank": m.RankBody,
    "rank_batch": m.RankBatchBody,
    "add_events": e.EventsBody,
    "put_items": m.ItemsBody,
    "rollback_items": m.RollbackBody,
    "complete": t.CompletionBody,
    "chat": t.ChatBody,
    "rerank": s.RerankBody,
    "rerank_v2": s.RerankBody,
    "generative_scoring": s.GenerativeScoringBody,
}
ANSWERS = {
    "recommend": m.RecommendAnswer,
    "rank": m.RankAnswer,
    "rank_batch": m.RankBatchAnswer,
    "add_events": e.EventsAnswer,
    "complete": t.CompletionAnswer,
    "chat": t.ChatAnswer,
    "rerank": s.RerankAnswer,
    "rerank_v2": s.RerankAnswer,
    "generative_scoring": s.GenerativeScoringAnswer,
    "history": e.HistoryAnswer,
    "item": m.ItemAnswer,
    "put_items": m.ItemsAnswer,
    "hide_item": m.HiddenAnswer,
    "rollback_items": m.RollbackAnswer,
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description of the app."""
    said = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = [*BODIES.values(), *ANSWERS.values(), m.ErrorAnswer, m.ItemBody]
    kinds = list(dict.fromkeys(kinds))
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    by_kind = dict(zip(kinds, schemas, strict=True))
    said["components"] = {"schemas": components}
    for operations in said["paths"].values():
        for operation in operations.values():
            name = operation["operationId"]
            if name in BODIES:
                content = {"application/json": {"schema": by_kind[BODIES[name]]}}
                operation["requestBody"] = {"required": True, "content": content}
            error = {"application/json": {"schema": by_kind[m.ErrorAnswer]}}
            operation["responses"] = {"default": {"description": "Refused.", "content": error}}
            if name == "delete_user":
                operation["responses"]["204"] = {"description": "Forgotten."}
                continue
            answered: dict[str, Any] = {"description": "Answered."}
            if name in ANSWERS:
                answered["content"] = {"application/json": {"schema": by_kind[ANSWERS[name]]}}
            operation["responses"]["200"] = answered
    return said
