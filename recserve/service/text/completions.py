"""Turns a text request body into engine requests, and their results into a response or a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.metadata import version as installed
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from recserve.schemas.experiments import ExperimentLabel
from recserve.schemas.items import InvalidRequest, TimingMs
from recserve.schemas.text import (
    ChatRequest,
    CompletionRequest,
    PromptDetails,
    SpeculationMetrics,
    TextMetrics,
    TextRequest,
    TextResponse,
    Usage,
)
from recserve.service.pending import Stopwatch
from recserve.service.text.answers import ChatShape, CompletionShape, Shape
from recserve.service.text.embeddings import Embeddings
from recserve.service.text.model import TextEngine, TextModel
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
from recserve.service.text.stream import Listener, Piece, TextReceiver, TextStream
from recserve.service.text.text_scores import TextScores
from recserve.speculation.completion import Completion, SpeculationCounts, TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.speculation.verifiers.registry import verifiers


@dataclass(frozen=True)
class PendingTexts:
    """Texts that the engine generates for one request body.

    Attributes:
        head: Fields that every response and chunk begins with.
        shape: Response format of the route.
        streams: The texts; `copies` of them per prompt, in prompt order.
        futures: Engine results, in the order of `streams`.
        copies: Number of texts per prompt.
        prompt_tokens: Length of each prompt.
        speculation: Drafting options.
        exact: True if the acceptance rule leaves the text's distribution unchanged.
        include_usage: True if a stream ends with a chunk of token counts.
        continuous_usage: True if every chunk has the token counts of its text so far.
        watch: Started when the body arrived.
        experiment: Experiment and arm of the request; UNSET outside experiments.
        scored: Prompts whose own tokens are scored; None if the request does not want that.
    """

    head: dict[str, Any]
    shape: Shape
    streams: tuple[TextStream, ...]
    futures: tuple[Future[Completion], ...]
    copies: int
    prompt_tokens: tuple[int, ...]
    speculation: Speculation
    exact: bool
    include_usage: bool
    continuous_usage: bool
    watch: Stopwatch
    experiment: ExperimentLabel | UnsetType = UNSET
    scored: ScoredPrompts | None = None

    @property
    def all_futures(self) -> tuple[Future[Any], ...]:
        """Engine results that a whole response needs."""
        return self.futures if self.scored is None else (*self.futures, *self.scored.futures)

    def cancel(self) -> None:
        """Cancels all texts."""
        for future in self.futures:
            future.cancel()

    def answer(self) -> TextResponse:
        """Waits for all texts and returns the response. Raises what the engine raised."""
        for future, stream in zip(self.futures, self.streams, strict=True):
            future.result()
            stream.wait()
        if self.scored is not None:
            self.scored.fill(self.streams, self.copies)
        return self.shape.answer(self.head | {"usage": self.usage()} | self._tail(), self.streams)

    def chunk(self, piece: Piece, last: bool) -> TextResponse:
        """Returns the chunk for a piece.

        Args:
            piece: A new piece of a text.
            last: True if neither a further piece nor a chunk of token counts follows.
        """
        usage: Usage | None | UnsetType = None if self.include_usage else UNSET
        if self.continuous_usage:
            usage = self.usage_so_far(piece)
        head = {**self.head, "usage": usage}
        if last and not self.include_usage:
            head |= self._tail()
        return self.shape.chunk(head, [piece])

    def counts(self) -> TextResponse:
        """Returns the chunk of token counts that follows the last piece with `include_usage`."""
        return self.shape.chunk(self.head | {"usage": self.usage()} | self._tail(), [])

    def _tail(self) -> dict[str, Any]:
        """Returns the fields of a whole response and of a stream's last chunk."""
        return {"metrics": self.metrics(), "experiment": self.experiment}

    def usage(self) -> Usage:
        """Returns the token counts of all texts."""
        written = sum(stream.num_tokens for stream in self.streams)
        # Copies share their prompt, so only the first text of each prompt counts.
        cached = sum(stream.timing.root_cached for stream in self.streams[:: self.copies])
        prompts = sum(self.prompt_tokens)
        return Usage(
            prompt_tokens=prompts,
            completion_tokens=written,
            total_tokens=prompts + written,
            prompt_tokens_details=PromptDetails(cached),
        )

    def usage_so_far(self, piece: Piece) -> Usage:
        """Returns the token counts of one text up to a piece, as vLLM counts them."""
        prompt = self.prompt_tokens[piece.index // self.copies]
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=piece.num_tokens,
            total_tokens=prompt + piece.num_tokens,
        )

    def timing_ms(self) -> TimingMs:
        """Returns the stages of the text that took longest."""
        return self.watch.read(max((s.timing for s in self.streams), key=lambda t: t.total_ms))

    def drafted(self) -> SpeculationCounts:
        """Returns the draft statistics, summed over the texts."""
        total = SpeculationCounts()
        for counts in [stream.counts for stream in self.streams]:
            total.num_drafts += counts.num_drafts
            total.num_draft_tokens += counts.num_draft_tokens
            total.num_accepted_tokens += counts.num_accepted_tokens
            total.num_draft_levels += counts.num_draft_levels
            places = len(counts.per_position)
            total.per_position += [0] * (places - len(total.per_position))
            for place, accepted in enumerate(counts.per_position):
                total.per_position[place] += accepted
        return total

    def metrics(self) -> TextMetrics:
        """Returns the draft statistics in the form of a response."""
        counts = self.drafted()
        if not counts.num_drafts:
            return TextMetrics(None)
        accepted = counts.num_accepted_tokens
        return TextMetrics(
            SpeculationMetrics(
                drafter=self.speculation.drafter,
                verifier=self.speculation.verifier,
                exact=self.exact,
                mean_acceptance_length=1 + accepted / counts.num_drafts,
                draft_acceptance_rate=accepted / max(counts.num_draft_tokens, 1),
                num_drafts=counts.num_drafts,
                num_draft_tokens=counts.num_draft_tokens,
                num_accepted_tokens=accepted,
                per_position=counts.per_position,
            )
        )


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
            most = body.max_tokens or max(1, min(COMPLETION_TOKENS, room))
            return sampling(body, self.model, prompt, most, body.logprobs)

        scored = scored_prompts(body, prompts, self.engine, self.model, deadline_s)
        return replace(self._begin(body, prompts, params, shape, call), scored=scored)

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
            most = body.max_completion_tokens or body.max_tokens
            return sampling(body, self.model, prompt, most, logprobs)

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
    ) -> PendingTexts:
        drafting = speculation(body.speculation, body.temperature, self.model)
        stops = stop_strings(body)
        echo = isinstance(body, CompletionRequest) and bool(body.echo)
        requests: list[TextQuery] = []
        streams: list[TextStream] = []
        copies = body.n or 1
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
                requests.append(
                    TextQuery(
                        prompt=tokens,
                        params=own,
                        speculation=drafting,
                        priority=body.priority,
                        deadline_s=call.deadline_s,
                        on_commit=stream.on_commit,
                    )
                )
                streams.append(stream)
        head = {
            "id": f"{shape.prefix}-{call.request_id or uuid.uuid4()}",
            "created": int(time.time()),
            "model": self.model.name,
            "system_fingerprint": self.fingerprint,
        }
        options = body.stream_options
        call.watch.features_done()
        return PendingTexts(
            head=head,
            shape=shape,
            streams=tuple(streams),
            futures=self._submit(requests, streams),
            copies=copies,
            prompt_tokens=tuple(len(prompt.tokens) for prompt in prompts),
            speculation=drafting,
            exact=verifiers()[drafting.verifier].exact,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            watch=call.watch,
        )

    def _submit(
        self, requests: Sequence[TextQuery], streams: Sequence[TextStream]
    ) -> tuple[Future[Completion], ...]:
        """Submits all requests, or none. Raises what the engine refuses a request with."""
        futures: list[Future[Completion]] = []
        try:
            for request, stream in zip(requests, streams, strict=True):
                future = self.engine.submit(request)
                future.add_done_callback(stream.end)
                futures.append(future)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return tuple(futures)


def _token_sources(body: TextRequest) -> bool:
    """Returns whether the chunks of a stream report the source of each token."""
    return body.stream_options is not None and body.stream_options.include_token_sources
