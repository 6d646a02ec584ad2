"""A request to continue a prompt of token ids, the commits of its steps, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from recserve.core.constraint import Constraint
from recserve.core.request import Timing
from recserve.speculation.sampling_params import SamplingParams, Speculation

FinishReason = Literal["stop", "length"]

# A body of many texts is served in groups of this cost, in prompt tokens. A group must take less
# than `GROUP_DELAY_S` of the engine. Otherwise texts of other bodies wait for several groups.
GROUP_COST = 1024
OUTPUT_COST = 4  # of a token of output: on a CPU, it takes as long as four tokens of a prompt


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output token, computed from the raw logits.

    Attributes:
        chosen: Log-probability of the output token itself.
        top_tokens: The most likely tokens, best first.
        top_values: Log-probabilities of `top_tokens`.
    """

    chosen: float
    top_tokens: tuple[int, ...]
    top_values: tuple[float, ...]


@dataclass(frozen=True)
class TextCommit:
    """Tokens that one step added to a text.

    Attributes:
        tokens: New tokens in order. Empty only if the text ended at a stop token.
        logprobs: One entry per token; empty unless the request asks for log-probabilities.
        finish_reason: Why the text ended; None before the last commit.
        num_accepted: Number of first tokens that a draft proposed and the target accepted.
        num_draft_tokens: Candidate nodes of the step's draft; 0 without a draft.
        num_draft_levels: Most candidates on a path of the draft.
        paused: Whether the scheduler paused the drafts of the text in this step.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_accepted: int = 0
    num_draft_tokens: int = 0
    num_draft_levels: int = 0
    paused: bool = False


@dataclass(frozen=True)
class TextQuery:
    """A request to continue a prompt.

    Attributes:
        prompt: [n] int64 token ids, n >= 1.
        params: Sampling parameters.
        speculation: Drafter and acceptance rule.
        priority: A smaller number is scheduled sooner.
        deadline_s: time.monotonic() value after which the result is useless; None means no
            deadline.
        on_commit: Called on the engine's thread after every step. If it returns True, the text ends
            there, for example because a stop string was found.
        group: Number of times GROUP_COST that the same body costs before this text. Later groups
            give way to the requests of other bodies.
        constraint: What the text may be. None leaves it free.
    """

    prompt: np.ndarray
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    priority: int = 0
    deadline_s: float | None = None
    on_commit: Callable[[TextCommit], bool] | None = None
    group: int = 0
    constraint: Constraint | None = None


@dataclass
class SpeculationCounts:
    """Draft statistics of one text. All lengths exclude the bonus token.

    Attributes:
        num_drafts: Number of drafts that were scored.
        num_draft_tokens: Candidate nodes of all drafts.
        num_accepted_tokens: Accepted tokens of all drafts.
        num_draft_levels: Levels of all drafts, the most nodes on a path of each.
        per_position: `per_position[d]` counts accepted tokens at depth d + 1 of their draft.
        num_paused_steps: Steps in which the scheduler paused the drafts of the text.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_levels: int = 0
    per_position: list[int] = field(default_factory=list)
    num_paused_steps: int = 0

    @property
    def kappa(self) -> float:
        """Tokens per step with a draft, bonus token included, times levels per drafted token.

        A chain has one level per token, so its kappa is its number of tokens per step. A tree has
        fewer levels than tokens: kappa is what it accepts for the tokens that it has verified. It
        is 1 without drafts, as in plain decoding.

        Source: SpecFormer (arXiv 2511.20340), a * l_d / k.
        """
        if not self.num_draft_tokens:
            return 1.0
        accepted = 1 + self.num_accepted_tokens / self.num_drafts
        return accepted * self.num_draft_levels / self.num_draft_tokens

    def add(self, drafted: int, accepted: int, levels: int | None = None) -> None:
        """Counts one more draft.

        Args:
            drafted: Number of candidate nodes in the draft.
            accepted: Length of the accepted path.
            levels: Levels of the draft. None means a chain.
        """
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_draft_levels += drafted if levels is None else levels
        counts = self.per_position
        if accepted > len(counts):
            counts += [0] * (accepted - len(counts))
        for depth in range(accepted):
            counts[depth] += 1


@dataclass(frozen=True)
class Completion:
    """Result of a TextQuery.

    Attributes:
        tokens: [m] int64 output tokens, without the stop token.
        finish_reason: `stop`, or `length` if max_tokens or the context limit was reached.
        stop_token: Token that ended the text; None if something else ended it.
        logprobs: One entry per output token; empty unless the request asks for them.
        counts: Draft statistics.
        timing: Time per stage.
    """

    tokens: np.ndarray
    finish_reason: FinishReason
    stop_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    timing: Timing = field(default_factory=Timing)
