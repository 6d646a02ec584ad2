"""Turns a text request body into engine requests, and their results into a response or a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from importlib.metadata import version as installed

import numpy as np

from recserve.core.client import LOCAL, Client
from recserve.core.request import PromptScores
from recserve.schemas.text import ChatRequest, CompletionRequest, TextRequest
from recserve.service.errors import Uncompiled
from recserve.service.pending import Stopwatch
from recserve.service.text.answers import ChatShape, CompletionShape, Shape
from recserve.service.text.chat_turns import TurnShape
from recserve.service.text.embeddings import Embeddings
from recserve.service.text.model import TextEngine, TextModel
from recserve.service.text.pending_texts import PendingTexts
from recserve.service.text.prompt_scores import add_prompt_scores, prompt_queries
from recserve.service.text.prompts import TextPlan, plan_chat, plan_completion
from recserve.service.text.stream import Listener, TextStream
from recserve.service.text.text_scores import TextScores
from recserve.speculation.completion import GROUP_COST, OUTPUT_COST, Completion, TextQuery
from recserve.tokenizer.token_bytes import Spelling


class TextService:
    """Answers the text requests of a language model.

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
        client: Client = LOCAL,
        cached: bool = False,
    ) -> PendingTexts:
        """Starts the texts of a completion request.

        Args:
            body: The request.
            request_id: Last part of the response's id; None generates one.
            deadline_s: time.monotonic() value after which the texts are useless; None means never.
            listener: Called with every piece, on the engine's thread.
            client: Who sends the request.
            cached: Whether to compile no constraint, which takes up to a second.

        Raises:
            Uncompiled: If a constraint has to be compiled first, which `cached` forbids.
            InvalidRequest: If a field is out of range; ContextExceeded is one of them.
            UnknownModel: If the body names another model.
            Exception: What the engine refuses the request with.
        """
        watch = Stopwatch()
        plan = _plan(partial(plan_completion, body, self.model, deadline_s), cached)
        tokenizer = self.model.tokenizer
        shape = CompletionShape(tokenizer.all_bytes, body.logprobs is not None, _sources(body))
        echoed = [prompt.text if body.echo else "" for prompt in plan.prompts]
        streams = self._streams(plan, body.min_tokens, listener, echoed, tokenizer.spelling)
        queries = _queries(body, plan, streams, deadline_s)
        scoring = []
        if body.scores_prompt:
            scoring = prompt_queries(body, plan.prompts, self.model.device, deadline_s)
        watch.features_done()
        submitted = self.engine.submit_all([*scoring, *queries], client)
        texts = submitted[len(scoring) :] if queries else [_empty_text() for _ in streams]

        def add_scores(results: list[PromptScores]) -> None:
            add_prompt_scores(body, plan.prompts, results, streams, tokenizer)

        head = self._head(shape, request_id)
        return PendingTexts(
            body, plan, shape, head, watch, streams, texts, submitted[: len(scoring)], add_scores
        )

    def begin_chat(
        self,
        body: ChatRequest,
        request_id: str | None = None,
        deadline_s: float | None = None,
        listener: Listener | None = None,
        client: Client = LOCAL,
        cached: bool = False,
    ) -> PendingTexts:
        """Starts the responses to a chat. Arguments and errors as in `begin_completion`."""
        watch = Stopwatch()
        plan = _plan(partial(plan_chat, body, self.model, deadline_s), cached)
        tokenizer, form = self.model.tokenizer, plan.form
        given = tokenizer.all_bytes, bool(body.logprobs), _sources(body)
        if form is None:
            shape = ChatShape(*given)
        else:
            shape = TurnShape(*given, form, body.include_reasoning is not False)
        spelling = tokenizer.spelling if form is None else tokenizer.spelling_with(form.tags)
        streams = self._streams(plan, body.min_tokens, listener, [""], spelling)
        queries = _queries(body, plan, streams, deadline_s)
        watch.features_done()
        texts = self.engine.submit_all(queries, client)
        return PendingTexts(body, plan, shape, self._head(shape, request_id), watch, streams, texts)

    def _streams(
        self,
        plan: TextPlan,
        min_tokens: int,
        listener: Listener | None,
        beginnings: list[str],
        spelling: Spelling,
    ) -> list[TextStream]:
        """Returns a stream per text; `beginnings` are the echoed prompts."""
        streams = []
        for number, prompt in enumerate(plan.prompts):
            before, tail = beginnings[number], prompt.open_tokens
            begun = spelling.is_begun(prompt.tokens[: len(prompt.tokens) - len(tail)])
            streams += [
                TextStream(
                    *(number * plan.copies + copy, spelling, plan.stops, min_tokens, listener),
                    *(before, begun, tail),
                )
                for copy in range(plan.copies)
            ]
        return streams

    def _head(self, shape: Shape, request_id: str | None) -> dict[str, object]:
        """Returns the fields that every response and chunk begins with."""
        return {
            "id": f"{shape.prefix}-{request_id or uuid.uuid4()}",
            "created": int(time.time()),
            "model": self.model.name,
            "system_fingerprint": self.fingerprint,
        }


def _plan(plan: Callable[[], TextPlan], cached: bool) -> TextPlan:
    """Returns the plan of a body, and compiles what it waits for. Raises Uncompiled if `cached`."""
    while True:
        try:
            return plan()
        except Uncompiled as needed:
            if cached:
                raise
            needed.compile()


def _queries(
    body: TextRequest, plan: TextPlan, streams: list[TextStream], deadline_s: float | None
) -> list[TextQuery]:
    """Returns the query of each text; none if every text is empty."""
    if body.most_tokens == 0:
        return []
    queries: list[TextQuery] = []
    prompts = [np.array(prompt.tokens, np.int64) for prompt in plan.prompts]
    cost = 0
    for index, (params, stream) in enumerate(zip(plan.params, streams, strict=True)):
        prompt = prompts[index // plan.copies]
        group = cost // GROUP_COST
        cost += OUTPUT_COST * params.max_tokens
        if index % plan.copies == 0:  # the copies share the prompt
            cost += len(prompt)
        queries.append(
            TextQuery(
                prompt=prompt,
                params=params,
                speculation=plan.speculation,
                priority=body.priority,
                deadline_s=deadline_s,
                on_commit=stream.on_commit,
                group=group,
                constraint=plan.constraint,
            )
        )
    return queries


def _empty_text() -> Future[Completion]:
    """Returns the result of a text that ends before its first token."""
    future: Future[Completion] = Future()
    future.set_result(Completion(np.zeros(0, np.int64), "length"))
    return future


def _sources(body: TextRequest) -> bool:
    """Returns whether the chunks of a stream report the source of each token."""
    return bool(body.stream_options and body.stream_options.include_token_sources)
