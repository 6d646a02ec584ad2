"""Handler of POST /v1/recommend."""

from __future__ import annotations

import msgspec

from recserve.schemas.api import Api
from recserve.schemas.items import RecommendRequest, RecommendResponse, without_log_probs
from recserve.schemas.numbers import exact_number
from recserve.server.context import RequestContext
from recserve.server.routing import handles, json_body

BODY = msgspec.json.Decoder(RecommendRequest, float_hook=exact_number)


@handles(Api.recommend, read=json_body(BODY))
async def recommend(context: RequestContext, body: RecommendRequest) -> RecommendResponse:
    """Answers with a slate, and logs it."""
    service, slate_log = context.service, context.state.slate_log
    answer = await context.state.answer_items(context, service.recommender.begin, body)
    context.state.metrics.rounds.observe(answer.rounds)
    if slate_log is None:
        return answer
    if not context.untracked:
        slate_log.slate(None if body.user is None else body.user.id, answer, service.signer)
    return without_log_probs(answer)  # they are for the log only
