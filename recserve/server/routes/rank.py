"""Handlers of POST /v1/rank and /v1/rank:batch."""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from recserve.schemas.api import Api
from recserve.schemas.items import (
    RankBatchRequest,
    RankBatchResponse,
    RankOutcome,
    RankRequest,
    RankResponse,
)
from recserve.server.context import RequestContext
from recserve.server.errors import error_answer
from recserve.server.routing import handles, json_response
from recserve.server.threads import is_large


@handles(Api.rank)
async def rank(context: RequestContext, body: RankRequest) -> RankResponse:
    """Answers with a ranking."""
    return await context.answer(context.service.ranker, body)


@handles(Api.rank_batch)
async def rank_batch(context: RequestContext, body: RankBatchRequest) -> Response:
    """Answers with several rankings; those of many candidates are written on a thread."""
    deadline_s = context.deadline_s(body.timeout_ms)
    ranker, trace = context.service.ranker, context.trace
    for one in body.requests:
        if one.min_catalog_version is not None:
            await context.await_version(one.min_catalog_version, deadline_s)
    submit = partial(ranker.begin_each, body, trace.request_id, deadline_s, context.client)
    found = await context.answer_all(ranker, body.requests, submit, deadline_s)
    for outcome in found:
        if not isinstance(outcome, Exception):
            trace.degraded.extend(outcome.degraded)

    def answer() -> Response:
        results = [
            RankOutcome(error=error_answer(outcome).error)
            if isinstance(outcome, Exception)
            else RankOutcome(answer=outcome)
            for outcome in found
        ]
        return json_response(RankBatchResponse(request_id=trace.request_id, results=results))

    return await context.compute(answer, is_large(body))
