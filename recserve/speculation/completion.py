"""A request to continue a prompt in token ids, what its steps commit, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from recserve.core.request import Timing
from recserve.speculation.sampling_params import SamplingParams, Speculation

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one written token, of the raw logits.

    chosen: of the written token. top_tokens, top_values: the likeliest ones, best first.
    """

    chosen: float
    top_tokens: tuple[int, ...]
    top_values: tuple[float, ...]


@dataclass(frozen=True)
class TextCommit:
    """What one step added to a text.

    tokens: in order, at least one unless the text ended at a stop token. logprobs: one for each,
    empty unless asked for. finish_reason: set with the last commit.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class TextQuery:
    """Continue a prompt.

    prompt [n] int64: at least one token. priority: smaller is sooner. deadline_s:
    time.monotonic() value after which the answer is useless. on_commit: called on the engine's
    thread after every step; returning True ends the text there (a stop string was found).
    """

    prompt: np.ndarray
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    priority: int = 0
    deadline_s: float | None = None
    on_commit: Callable[[TextCommit], bool] | None = None


@dataclass
class SpeculationCounts:
    """What drafting did for one text; the lengths leave the bonus token out.

    per_position[d]: accepted tokens at depth d + 1 of their draft.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    per_position: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """One more draft of `drafted` candidate nodes, of which a path of `accepted` was kept."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        counts = self.per_position
        if accepted > len(counts):
            counts += [0] * (accepted - len(counts))
        for depth in range(accepted):
            counts[depth] += 1


@dataclass(frozen=True)
class Completion:
    """Answer to a TextQuery.

    tokens [m] int64: what was written, without the stop token. stop_token: the one that ended it,
    None if something else did. finish_reason: `length` for max_tokens and for the context limit.
    """

    tokens: np.ndarray
    finish_reason: FinishReason
    stop_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    timing: Timing = field(default_factory=Timing)
