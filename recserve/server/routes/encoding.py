"""Handlers that encode texts with the language model and its tokeniser."""

from __future__ import annotations

from functools import partial

from recserve.schemas.api import Api
from recserve.schemas.encoding import (
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingsRequest,
    EmbeddingsResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from recserve.server.context import RequestContext
from recserve.server.routing import handles
from recserve.server.threads import on_thread


@handles(Api.embeddings)
async def embeddings(context: RequestContext, body: EmbeddingsRequest) -> EmbeddingsResponse:
    """Answers with a vector per text, which is made on a thread."""
    deadline_s = context.deadline_s(body.timeout_ms)
    begin = partial(context.service.text.embeddings.begin, body, deadline_s, context.client)
    work = await context.prepare(begin, deadline_s, context.state.threads.text)
    await context.wait(work.futures, deadline_s)
    return await on_thread(context.state.threads.text, work.wait, context.client, deadline_s)


@handles(Api.tokenize)
async def tokenize(context: RequestContext, body: TokenizeRequest) -> TokenizeResponse:
    """Answers with tokens."""
    deadline_s = context.deadline_s(None)
    call = partial(context.service.text.embeddings.tokenize, body, deadline_s)
    return await context.prepare(call, deadline_s, context.state.threads.text)


@handles(Api.tokenizer_info)
async def tokenizer_info(context: RequestContext) -> TokenizerInfo:
    """Answers with special tokens and chat template."""
    return context.service.text.embeddings.tokenizer_info()


@handles(Api.detokenize)
async def detokenize(context: RequestContext, body: DetokenizeRequest) -> DetokenizeResponse:
    """Answers with a text."""
    call = partial(context.service.text.embeddings.detokenize, body)
    return await context.prepare(call, context.deadline_s(None), context.state.threads.text)
