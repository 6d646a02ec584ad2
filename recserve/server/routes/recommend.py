"""Handlers of POST /v1/recommend and /v1/similar."""

from __future__ import annotations

import msgspec

from recserve.schemas.api import Api
from recserve.schemas.items import RecommendRequest, RecommendResponse, SimilarRequest
from recserve.schemas.numbers import exact_number
from recserve.server.context import RequestContext
from recserve.server.routing import handles, json_body

BODY = msgspec.json.Decoder(RecommendRequest, float_hook=exact_number)
SIMILAR = msgspec.json.Decoder(SimilarRequest, float_hook=exact_number)


@handles(Api.recommend, read=json_body(BODY))
async def recommend(context: RequestContext, body: RecommendRequest) -> RecommendResponse:
    """Answers with a slate."""
    answer = await context.answer(context.service.recommender, body)
    return context.service.show(body, answer, not context.untracked)


@handles(Api.similar, read=json_body(SIMILAR))
async def similar(context: RequestContext, body: SimilarRequest) -> RecommendResponse:
    """Answers with similar items; they take no part in experiments."""
    asked, deadline_s = body.as_recommend(), context.deadline_s(body.timeout_ms)
    part, request_id = context.service.recommender, context.trace.request_id
    answer = context.record(await context.ask(part, asked, request_id, deadline_s))
    return context.service.show(asked, answer, not context.untracked)
