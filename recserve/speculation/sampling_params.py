"""How the next token is drawn, and how text is drafted, as a request says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn from the target's logits, in this order of application.

    logit_bias: added to the logits of the named tokens. min_tokens: no stop token is written
    before so many. bad_words: token sequences whose last token may not follow the others.
    repetition_penalty: divides (multiplies where negative) the logits of every token in prompt or
    output. presence_penalty, frequency_penalty: subtracted once, or once per occurrence, for tokens
    in the output. temperature: divides the logits; 0 is the largest logit, ties to the lowest
    token. top_k: 0 keeps all. top_p: the fewest likeliest tokens that hold this mass. min_p: at
    least this share of the likeliest token's probability. Tokens equal to the last kept one are
    kept too. seed: the noise is keyed by it and by the absolute position of the drawn token.
    max_tokens: most tokens written. stop_token_ids: end the text and are not part of it; an
    end-of-text token is one of them only if it is named. logprobs: how many of the likeliest
    tokens to report beside each written one, of the raw logits; None reports nothing.
    Raises ValueError for a value out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, None)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _within("max_tokens", self.max_tokens, 1, None)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        _within("logprobs", self.logprobs or 0, 0, None)
        _within("seed", self.seed, -(2**63), 2**63 - 1)
        for value in self.logit_bias.values():
            _within("logit_bias", value, -1e9, 1e9)
        if any(not word for word in self.bad_words):
            raise ValueError("bad_words holds an empty sequence; each needs at least one token")

    @property
    def greedy(self) -> bool:
        """Whether no noise is involved."""
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are left out of a draw for being unlikely."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def counts_tokens(self) -> bool:
        """Whether the logits depend on how often tokens occurred."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True)
class Speculation:
    """How a request's text is drafted and accepted.

    drafter, verifier: names the engine knows. num_tokens: most draft nodes a step, None: what the
    drafter does by itself. tree: rank paths of a static tree, as Medusa's choices, for drafters
    that take one: (0,) is the likeliest child of the last committed token, (0, 1) the second
    likeliest child of that.
    Raises ValueError for a value out of its range.
    """

    drafter: str = "none"
    verifier: str = "sample"
    num_tokens: int | None = None
    tree: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        _within("num_tokens", self.num_tokens or 0, 0, None)
        ranks = [rank for path in self.tree or () for rank in path]
        _within("a rank of the tree", min(ranks, default=0), 0, None)
        if self.tree is not None and not all(self.tree):
            raise ValueError("the tree holds an empty path; each names at least one rank")


def _within(name: str, value: float, low: float, high: float | None) -> None:
    if not low <= value or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} is {value}; it must be {bound}")
