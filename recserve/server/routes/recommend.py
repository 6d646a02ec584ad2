"""Handler of POST /v1/recommend."""

from __future__ import annotations

import msgspec

from recserve.schemas.api import Api
from recserve.schemas.items import RecommendRequest, RecommendResponse
from recserve.schemas.numbers import exact_number
from recserve.server.context import RequestContext
from recserve.server.routing import handles, json_body

BODY = msgspec.json.Decoder(RecommendRequest, float_hook=exact_number)


@handles(Api.recommend, read=json_body(BODY))
async def recommend(context: RequestContext, body: RecommendRequest) -> RecommendResponse:
    """Answers with a slate."""
    answer = await context.answer(context.service.recommender, body)
    return context.service.show(body, answer, not context.untracked)
