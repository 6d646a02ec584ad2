"""Texts that the engine generates for one request body, and their response or stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from msgspec import UNSET, UnsetType

from recserve.core.request import PromptScores, Timing
from recserve.drafters.none import NoDrafter
from recserve.schemas.experiments import ExperimentLabel
from recserve.schemas.items import TimingMs
from recserve.schemas.speculation import SpeculationMetrics
from recserve.schemas.text import (
    PromptDetails,
    StreamOptions,
    TextMetrics,
    TextRequest,
    TextResponse,
    Usage,
)
from recserve.service.pending import Pending, Stopwatch
from recserve.service.text.answers import Shape
from recserve.service.text.prompts import TextPlan
from recserve.service.text.stream import Piece, TextStream
from recserve.speculation.completion import Completion, SpeculationCounts
from recserve.speculation.verifiers.registry import verifiers


class PendingTexts(Pending[TextResponse]):
    """Texts that the engine generates for one request body.

    Attributes:
        futures: The engine's results of the texts, then those of the prompts' own tokens.
        streams: The texts; `plan.copies` of them per prompt, in prompt order.
        plan: What the body asks for.
        include_usage: True if a stream ends with a chunk of token counts.
        experiment: Experiment and arm of the request; UNSET outside experiments.
    """

    def __init__(
        self,
        body: TextRequest,
        plan: TextPlan,
        shape: Shape,
        head: dict[str, Any],
        watch: Stopwatch,
        streams: Sequence[TextStream],
        texts: Sequence[Future[Completion]],
        prompt_scores: Sequence[Future[PromptScores]] = (),
        add_scores: Callable[[list[PromptScores]], None] | None = None,
    ) -> None:
        """Connects the streams with the engine's results.

        Args:
            body: The request.
            plan: What the body asks for.
            shape: Response format of the route.
            head: Fields that every response and chunk begins with.
            watch: Started when the body arrived.
            streams: The texts.
            texts: Their results.
            prompt_scores: Results of the prompts' own tokens; empty if they are not scored.
            add_scores: Adds these to the streams.
        """
        super().__init__([*texts, *prompt_scores], self._respond)
        self.plan = plan
        self.streams = streams
        self.experiment: ExperimentLabel | UnsetType = UNSET
        options = body.stream_options or StreamOptions()
        self.include_usage = bool(options.include_usage)
        self._continuous_usage = self.include_usage and bool(options.continuous_usage_stats)
        self._shape, self._head, self._watch = shape, head, watch
        self._add_scores = add_scores
        for future, stream in zip(texts, streams, strict=True):
            future.add_done_callback(stream.end)

    def _respond(self, results: list[Any]) -> TextResponse:
        for stream in self.streams:
            stream.wait()
        if self._add_scores is not None and len(results) > len(self.streams):
            self._add_scores(results[len(self.streams) :])
        head = self._head | {"usage": self.usage()} | self._tail()
        return self._shape.answer(head, self.streams)

    def chunk(self, piece: Piece, last: bool) -> TextResponse:
        """Returns the chunk for a piece.

        Args:
            piece: A new piece of a text.
            last: True if neither a further piece nor a chunk of token counts follows.
        """
        usage: Usage | None | UnsetType = None if self.include_usage else UNSET
        if self._continuous_usage:
            usage = self.usage_so_far(piece)
        head = {**self._head, "usage": usage}
        if last and not self.include_usage:
            head |= self._tail()
        return self._shape.chunk(head, [piece])

    def counts(self) -> TextResponse:
        """Returns the chunk of token counts that follows the last piece with `include_usage`."""
        return self._shape.chunk(self._head | {"usage": self.usage()} | self._tail(), [])

    def _tail(self) -> dict[str, Any]:
        """Returns the fields of a whole response and of a stream's last chunk."""
        return {"metrics": self.metrics(), "experiment": self.experiment}

    def describe(
        self, take: Callable[[Sequence[int], Sequence[int], Sequence[int], Timing], None]
    ) -> None:
        """Passes on the tokens of each prompt and text, the most of each text, and the stages."""
        take(
            [len(prompt.tokens) for prompt in self.plan.prompts],
            [stream.num_tokens for stream in self.streams],
            [params.max_tokens for params in self.plan.params],
            self._slowest(),
        )

    def _slowest(self) -> Timing:
        """Returns the stages of the text that took longest."""
        return max((s.timing for s in self.streams), key=lambda t: t.total_ms)

    def usage(self) -> Usage:
        """Returns the token counts of all texts."""
        written = sum(stream.num_tokens for stream in self.streams)
        # Copies share their prompt, so only the first text of each prompt counts.
        cached = sum(stream.timing.prefix_cached for stream in self.streams[:: self.plan.copies])
        prompts = sum(len(prompt.tokens) for prompt in self.plan.prompts)
        return Usage(
            prompt_tokens=prompts,
            completion_tokens=written,
            total_tokens=prompts + written,
            prompt_tokens_details=PromptDetails(cached),
        )

    def usage_so_far(self, piece: Piece) -> Usage:
        """Returns the token counts of one text up to a piece, as vLLM counts them."""
        prompt = len(self.plan.prompts[piece.index // self.plan.copies].tokens)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=piece.num_tokens,
            total_tokens=prompt + piece.num_tokens,
        )

    def timing_ms(self) -> TimingMs:
        """Returns the stages of the text that took longest."""
        return self._watch.read(self._slowest())

    def sum_drafts(self) -> SpeculationCounts:
        """Returns the draft statistics, summed over the texts."""
        total = SpeculationCounts()
        for counts in [stream.counts for stream in self.streams]:
            total.num_drafts += counts.num_drafts
            total.num_draft_tokens += counts.num_draft_tokens
            total.num_accepted_tokens += counts.num_accepted_tokens
            total.num_draft_levels += counts.num_draft_levels
            total.num_paused_steps += counts.num_paused_steps
            places = len(counts.per_position)
            total.per_position += [0] * (places - len(total.per_position))
            for place, accepted in enumerate(counts.per_position):
                total.per_position[place] += accepted
        return total

    def metrics(self) -> TextMetrics:
        """Returns the draft statistics in the form of a response; none for plain decoding."""
        if self.plan.speculation.drafter == NoDrafter.name:
            return TextMetrics(None)
        counts = self.sum_drafts()
        accepted = counts.num_accepted_tokens
        return TextMetrics(
            SpeculationMetrics(
                drafter=self.plan.speculation.drafter,
                verifier=self.plan.speculation.verifier,
                exact=verifiers()[self.plan.speculation.verifier].exact,
                mean_acceptance_length=1 + accepted / max(counts.num_drafts, 1),
                draft_acceptance_rate=accepted / max(counts.num_draft_tokens, 1),
                num_drafts=counts.num_drafts,
                num_draft_tokens=counts.num_draft_tokens,
                num_accepted_tokens=accepted,
                per_position=counts.per_position,
                num_paused_steps=counts.num_paused_steps,
            )
        )
