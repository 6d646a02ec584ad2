"""Turns a text request body into engine requests, and their results into a response or a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib.metadata import version as installed
from typing import Any

import numpy as np

from recserve.schemas.items import InvalidRequest
from recserve.schemas.text import (
    ChatRequest,
    CompletionRequest,
    TextRequest,
)
from recserve.service.pending import Stopwatch
from recserve.service.text.answers import ChatShape, CompletionShape, Shape
from recserve.service.text.embeddings import Embeddings
from recserve.service.text.model import TextEngine, TextModel
from recserve.service.text.pending_texts import PendingTexts
from recserve.service.text.prompt_scores import ScoredPrompts, scored_prompts
from recserve.service.text.prompts import (
    COMPLETION_TOKENS,
    Prompt,
    chat_prompt,
    completion_prompts,
    derived_seed,
    sampling,
    speculation,
    stop_strings,
)
from recserve.service.text.stream import Listener, TextReceiver, TextStream
from recserve.service.text.text_scores import TextScores
from recserve.speculation.completion import GROUP_COST, OUTPUT_COST, Completion, TextQuery
from recserve.speculation.sampling_params import SamplingParams
from recserve.speculation.verifiers.registry import verifiers


class Texts:
    """The text routes' side of a language model.

    Attributes:
        engine: Runs the requests.
        model: The served model.
        scores: The same model as a scorer of given texts.
        embeddings: The same model as an encoder of texts.
        fingerprint: Name and version of this server, for `system_fingerprint`.
    """

    def __init__(self, engine: TextEngine, model: TextModel) -> None:
        self.engine = engine
        self.model = model
        self.scores = TextScores(engine, model)
        self.embeddings = Embeddings(engine, model)
        self.fingerprint = f"recserve-{installed('recserve')}"

    def begin_completion(
        self,
        body: CompletionRequest,
        request_id: str | None = None,
        deadline_s: float | None = None,
        listener: Listener | None = None,
    ) -> PendingTexts:
        """Starts the texts of a completion request.

        Args:
            body: The request.
            request_id: Last part of the response's id; None generates one.
            deadline_s: time.monotonic() value after which the texts are useless; None means never.
            listener: Called with every piece, on the engine's thread.

        Raises:
            InvalidRequest: If a field is out of range; ContextExceeded is one of them.
            UnknownModel: If the body names another model.
            Exception: What the engine refuses the request with.
        """
        call = TextReceiver(self._check(body), request_id, deadline_s, listener)
        prompts = completion_prompts(body, self.model)
        table = self.model.tokenizer.all_bytes
        shape = CompletionShape(table, body.logprobs is not None, _token_sources(body))

        def params(prompt: Prompt) -> SamplingParams:
            room = self.model.context - len(prompt.tokens)
            most = body.most_tokens
            if most is None:
                most = max(1, min(COMPLETION_TOKENS, room))
            return sampling(body, self.model, prompt, most, body.logprobs)

        scored = scored_prompts(body, prompts, self.model, deadline_s)
        return self._begin(body, prompts, params, shape, call, scored)

    def begin_chat(
        self,
        body: ChatRequest,
        request_id: str | None = None,
        deadline_s: float | None = None,
        listener: Listener | None = None,
    ) -> PendingTexts:
        """Starts the responses to a chat. Arguments and errors as in `begin_completion`."""
        call = TextReceiver(self._check(body), request_id, deadline_s, listener)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs: true")
        prompt = chat_prompt(body, self.model)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        table, sources = self.model.tokenizer.all_bytes, _token_sources(body)
        shape = ChatShape(table, logprobs is not None, sources)

        def params(prompt: Prompt) -> SamplingParams:
            return sampling(body, self.model, prompt, body.most_tokens, logprobs)

        return self._begin(body, [prompt], params, shape, call)

    def described(self) -> list[dict[str, Any]]:
        """Returns the model in OpenAI's form under each of its names."""
        return self.model.listed()

    def _check(self, body: TextRequest) -> Stopwatch:
        self.model.check_name(body.model)
        body.check()
        return Stopwatch()

    def _begin(
        self,
        body: TextRequest,
        prompts: Sequence[Prompt],
        params: Callable[[Prompt], SamplingParams],
        shape: Shape,
        call: TextReceiver,
        scored: ScoredPrompts | None = None,
    ) -> PendingTexts:
        """Builds all requests of a body, and then submits all of them or none."""
        drafting = speculation(body.speculation, body.temperature, self.model)
        stops = stop_strings(body)
        echo = isinstance(body, CompletionRequest) and bool(body.echo)
        requests: list[TextQuery] = []
        streams: list[TextStream] = []
        copies, cost = body.n or 1, 0
        for prompt in prompts:
            first = params(prompt)
            tokens = np.array(prompt.tokens, np.int64)
            for copy in range(copies):
                stream = TextStream(
                    len(streams),
                    self.model.tokenizer.text_bytes,
                    stops,
                    body.min_tokens,
                    call.listener,
                    prompt.text if echo else "",
                )
                own = replace(first, seed=derived_seed(first.seed, copy))
                group = cost // GROUP_COST
                cost += OUTPUT_COST * own.max_tokens + (len(tokens) if copy == 0 else 0)
                requests.append(
                    TextQuery(
                        prompt=tokens,
                        params=own,
                        speculation=drafting,
                        priority=body.priority,
                        deadline_s=call.deadline_s,
                        on_commit=stream.on_commit,
                        group=group,
                    )
                )
                streams.append(stream)
        head = {
            "id": f"{shape.prefix}-{call.request_id or uuid.uuid4()}",
            "created": int(time.time()),
            "model": self.model.name,
            "system_fingerprint": self.fingerprint,
        }
        options, exact = body.stream_options, verifiers()[drafting.verifier].exact
        if body.most_tokens == 0:  # every text is empty and complete
            requests = []
        call.watch.features_done()
        scoring = [] if scored is None else scored.queries
        submitted = self.engine.submit_all([*scoring, *requests])
        if scored is not None:
            scored = replace(scored, futures=tuple(submitted[: len(scoring)]))
        futures: list[Future[Completion]] = submitted[len(scoring) :]
        if not requests:
            futures = [_empty_text() for _ in streams]
        for future, stream in zip(futures, streams, strict=True):
            future.add_done_callback(stream.end)
        return PendingTexts(
            head=head,
            shape=shape,
            streams=tuple(streams),
            futures=tuple(futures),
            copies=copies,
            prompt_tokens=tuple(len(prompt.tokens) for prompt in prompts),
            speculation=drafting,
            exact=exact,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            watch=call.watch,
            scored=scored,
        )


def _empty_text() -> Future[Completion]:
    """Returns the result of a text that ends before its first token."""
    future: Future[Completion] = Future()
    future.set_result(Completion(np.zeros(0, np.int64), "length"))
    return future


def _token_sources(body: TextRequest) -> bool:
    """Returns whether the chunks of a stream report the source of each token."""
    return body.stream_options is not None and body.stream_options.include_token_sources
