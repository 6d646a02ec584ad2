"""Routes POST /v1/embeddings, /tokenize and /detokenize."""

from __future__ import annotations

from functools import partial

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from recserve.schemas.encoding import DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from recserve.server.app_state import AppState, json_response, wait_all
from recserve.server.threads import TEXT_MODELS, checked_first, on_thread

EMBEDDINGS_BODY = msgspec.json.Decoder(EmbeddingsRequest)
TOKENIZE_BODY = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE_BODY = msgspec.json.Decoder(DetokenizeRequest)


def add_routes(app: FastAPI, app_state: AppState) -> None:
    """Adds the routes that encode texts with the language model and its tokeniser."""

    @app.post("/v1/embeddings", operation_id="embeddings")
    async def embeddings(request: Request) -> Response:
        """Return a vector per text: the mean of the model's final hidden states, of length 1."""
        body = await app_state.body(request, EMBEDDINGS_BODY)
        deadline_s = app_state.text_deadline_s(request, body.timeout_ms)
        call = partial(app_state.service.text.embeddings.begin, body, deadline_s)
        pool, engine = app_state.threads.text, app_state.service.engine
        work = await on_thread(pool, checked_first(engine, TEXT_MODELS, deadline_s, call))
        await wait_all(request, work.futures, deadline_s)
        return json_response(await on_thread(pool, work.wait))

    @app.post("/tokenize", operation_id="tokenize")
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text or of a chat's prompt, in vLLM's format."""
        body = await app_state.body(request, TOKENIZE_BODY)
        call = partial(app_state.service.text.embeddings.tokenize, body)
        return json_response(await on_thread(app_state.threads.text, call))

    @app.get("/tokenizer_info", operation_id="tokenizer_info")
    async def tokenizer_info() -> Response:
        """Return the special tokens and the chat template of the language model, as vLLM does."""
        return json_response(app_state.service.text.embeddings.tokenizer_info())

    @app.post("/detokenize", operation_id="detokenize")
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens, in vLLM's format."""
        body = await app_state.body(request, DETOKENIZE_BODY)
        call = partial(app_state.service.text.embeddings.detokenize, body)
        return json_response(await on_thread(app_state.threads.text, call))
