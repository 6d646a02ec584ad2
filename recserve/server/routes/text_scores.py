"""Handlers of POST /v1/rerank, /v2/rerank and /generative_scoring."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from recserve.schemas.api import Api
from recserve.schemas.scoring import (
    GenerativeScoringRequest,
    GenerativeScoringResponse,
    RerankRequest,
    RerankResponse,
)
from recserve.server.context import RequestContext
from recserve.server.routing import handles
from recserve.service.pending import Pending

A = TypeVar("A")


@handles(Api.rerank)
async def rerank(context: RequestContext, body: RerankRequest) -> RerankResponse:
    """Answers in Jina's format."""
    return await _rerank(context, body, "1")


@handles(Api.rerank_v2)
async def rerank_v2(context: RequestContext, body: RerankRequest) -> RerankResponse:
    """Answers in Cohere's format."""
    return await _rerank(context, body, "2")


@handles(Api.generative_scoring)
async def generative_scoring(
    context: RequestContext, body: GenerativeScoringRequest
) -> GenerativeScoringResponse:
    """Answers with probabilities of label tokens."""
    deadline_s, name = context.deadline_s(body.timeout_ms), context.trace.request_id
    scores = context.service.text.scores
    begin = partial(scores.begin_scoring, body, name, deadline_s, context.client)
    return await _answer(context, deadline_s, begin)


async def _rerank(context: RequestContext, body: RerankRequest, version: str) -> RerankResponse:
    deadline_s, name = context.deadline_s(body.timeout_ms), context.trace.request_id
    scores = context.service.text.scores
    begin = partial(scores.begin_rerank, body, version, name, deadline_s, context.client)
    return await _answer(context, deadline_s, begin)


async def _answer(context: RequestContext, deadline_s: float, begin: Callable[[], Pending[A]]) -> A:
    work = await context.prepare(begin, deadline_s, context.state.threads.text)
    await context.wait(work.futures, deadline_s)
    return work.wait()
