"""Texts that the engine generates for one request body, and their response or stream."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType

from recserve.core.futures import wait_all
from recserve.schemas.experiments import ExperimentLabel
from recserve.schemas.items import TimingMs
from recserve.schemas.speculation import SpeculationMetrics
from recserve.schemas.text import PromptDetails, TextMetrics, TextResponse, Usage
from recserve.service.pending import Stopwatch
from recserve.service.text.answers import Shape
from recserve.service.text.prompt_scores import ScoredPrompts
from recserve.service.text.stream import Piece, TextStream
from recserve.speculation.completion import Completion, SpeculationCounts
from recserve.speculation.drafters.none import NoDrafter
from recserve.speculation.sampling_params import Speculation


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
        """Cancels all texts and the scores of their prompts."""
        for future in self.all_futures:
            future.cancel()

    def answer(self) -> TextResponse:
        """Waits for all texts and returns the response. Raises what the engine raised."""
        wait_all(self.all_futures)
        for stream in self.streams:
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
            total.num_paused_steps += counts.num_paused_steps
            places = len(counts.per_position)
            total.per_position += [0] * (places - len(total.per_position))
            for place, accepted in enumerate(counts.per_position):
                total.per_position[place] += accepted
        return total

    def metrics(self) -> TextMetrics:
        """Returns the draft statistics in the form of a response; none for plain decoding."""
        if self.speculation.drafter == NoDrafter.name:
            return TextMetrics(None)
        counts = self.drafted()
        accepted = counts.num_accepted_tokens
        return TextMetrics(
            SpeculationMetrics(
                drafter=self.speculation.drafter,
                verifier=self.speculation.verifier,
                exact=self.exact,
                mean_acceptance_length=1 + accepted / max(counts.num_drafts, 1),
                draft_acceptance_rate=accepted / max(counts.num_draft_tokens, 1),
                num_drafts=counts.num_drafts,
                num_draft_tokens=counts.num_draft_tokens,
                num_accepted_tokens=accepted,
                per_position=counts.per_position,
                num_paused_steps=counts.num_paused_steps,
            )
        )
