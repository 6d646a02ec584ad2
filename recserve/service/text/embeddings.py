"""Vectors of texts: the mean of the language model's final hidden states, scaled to length 1.

A model that was trained to continue texts is not trained for this. Its vectors are a baseline.
"""

from __future__ import annotations

import base64

import numpy as np

from recserve.core.client import LOCAL, Client
from recserve.core.request import PromptQuery, PromptScores
from recserve.schemas.encoding import (
    MAX_INPUTS,
    DetokenizeRequest,
    DetokenizeResponse,
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from recserve.schemas.items import InvalidRequest
from recserve.schemas.text import Usage
from recserve.service.pending import Pending
from recserve.service.text.model import TextEngine, TextModel
from recserve.service.text.prompt_scores import prompt_query
from recserve.service.text.prompts import (
    chat_text,
    check_deadline,
    check_tokens,
    encode_text,
    name_texts,
)

# Tokens that /tokenize and /detokenize convert in one request, unless the context is longer.
MAX_CONVERTED = 1 << 16


class Embeddings:
    """A language model as an encoder of texts."""

    def __init__(self, engine: TextEngine, model: TextModel) -> None:
        self.engine = engine
        self.model = model

    def begin(
        self,
        body: EmbeddingsRequest,
        deadline_s: float | None = None,
        client: Client = LOCAL,
    ) -> Pending[EmbeddingsResponse]:
        """Starts the vectors of a request's inputs.

        Args:
            body: The request.
            deadline_s: time.monotonic() value after which they are useless; None means never.
            client: Who sends the request.

        Raises:
            InvalidRequest: If a field is out of range.
            ContextExceeded: If an input does not fit the context.
            UnknownModel: If the body names another model.
            Exception: What the engine refuses the request with.
        """
        self.model.check_name(body.model)
        body.check()
        given = name_texts("input", body.input, MAX_INPUTS)
        inputs = [self._tokens(param, one, deadline_s) for param, one in given.items()]
        queries: list[PromptQuery] = []
        num_tokens = 0
        for tokens in inputs:
            query = prompt_query(
                tokens, self.model.device, mean=True, deadline_s=deadline_s, before=num_tokens
            )
            queries.append(query)
            num_tokens += len(tokens)

        def finish(results: list[PromptScores]) -> EmbeddingsResponse:
            data = []
            for index, scores in enumerate(results):
                mean = scores.mean
                assert mean is not None
                vector = mean / max(float(np.linalg.norm(mean)), 1e-12)
                packed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
                value = packed if body.encoding_format == "base64" else vector.tolist()
                data.append(Embedding(index=index, embedding=value))
            usage = Usage(prompt_tokens=num_tokens, completion_tokens=0, total_tokens=num_tokens)
            return EmbeddingsResponse(data=data, model=self.model.name, usage=usage)

        return Pending(self.engine.submit_all(queries, client), finish)

    def tokenize(self, body: TokenizeRequest, deadline_s: float | None = None) -> TokenizeResponse:
        """Returns the tokens of a text or of a chat's prompt. Raises as `begin`.

        It may have more tokens than the context, so that clients can count them, up to
        MAX_CONVERTED.
        """
        self.model.check_name(body.model)
        body.check()
        if body.messages is None:
            text, special = body.prompt or "", body.add_special_tokens is not False
        else:
            text = chat_text(body, body.messages, self.model, deadline_s)
            special = bool(body.add_special_tokens)
        param = "prompt" if body.messages is None else "messages"
        self._check_count(param, self.model.tokenizer.min_tokens(text))
        check_deadline(deadline_s)
        tokens = self.model.tokenizer.encode(text, special)
        self._check_count(param, len(tokens))
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=self.model.context,
            tokens=tokens,
            token_strs=self.model.tokenizer.names(tokens) if body.return_token_strs else None,
        )

    def detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        """Returns the text of tokens. Raises as `begin`."""
        self.model.check_name(body.model)
        self._check_count("tokens", len(body.tokens))
        check_tokens("tokens", body.tokens, self.model)
        return DetokenizeResponse(prompt=self.model.tokenizer.decode(body.tokens))

    def tokenizer_info(self) -> TokenizerInfo:
        """Returns the special tokens and the chat template of the model."""
        tokenizer = self.model.tokenizer
        known = TokenizerInfo.__struct_fields__
        names = {name: token for name, token in tokenizer.special.items() if name in known}
        template = tokenizer.template
        return TokenizerInfo(
            model_max_length=self.model.context,
            tokenizer_class=tokenizer.class_name,
            chat_template=None if template is None else template.source,
            **names,
        )

    def _tokens(self, param: str, given: str | list[int], deadline_s: float | None) -> list[int]:
        tokens = encode_text(param, given, self.model, deadline_s=deadline_s)
        if not tokens:
            raise InvalidRequest(param, "is empty; a vector needs at least one token")
        return tokens

    def _check_count(self, param: str, least: int) -> None:
        """Refuses more tokens than /tokenize and /detokenize convert in one request."""
        most = max(MAX_CONVERTED, self.model.context)
        if least > most:
            raise InvalidRequest(
                param, f"expected at most {most} tokens, got {least} or more; split it"
            )
