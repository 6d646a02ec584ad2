"""Sampling parameters and drafting options of a text request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recserve.core.field_checks import check_float, check_int

# The smallest temperature besides 0. A logit divided by it is a finite float32 number, whatever
# biases and penalties were added to it.
MIN_TEMPERATURE = 1e-20
MAX_COUNT = 2**31  # the largest count and token that the HTTP schemas accept


@dataclass(frozen=True)
class SamplingParams:
    """Parameters that turn the target's logits into the next token.

    They apply in this order: logit_bias, min_tokens, bad_words, the penalties, temperature, top_k,
    top_p, min_p. Tokens that tie with the last one inside a truncation also remain.

    Attributes:
        temperature: Divides the logits. 0 takes the largest logit, ties to the lowest token. Other
            values are at least MIN_TEMPERATURE.
        top_k: Number of likeliest tokens to draw from; 0 means all.
        top_p: Draw from the smallest set of likeliest tokens that holds this probability.
        min_p: Smallest probability, as a share of the likeliest token's probability.
        repetition_penalty: Divides positive logits, and multiplies negative ones, of every token
            that occurs in prompt or output.
        presence_penalty: Subtracted from the logits of every token that occurs in the output.
        frequency_penalty: Subtracted once per occurrence of a token in the output.
        logit_bias: Values added to the logits of the named tokens.
        bad_words: Token sequences; the last token of each may not follow the others.
        seed: Keys the noise, together with the absolute position of the drawn token.
        max_tokens: Most output tokens.
        min_tokens: Stop tokens are banned before this many output tokens.
        stop_token_ids: Tokens that end the text and are not part of it. An end-of-text token counts
            only if it is named here.
        logprobs: Number of likeliest tokens to report at each output token, from the raw logits;
            None reports nothing.

    Raises:
        ValueError: If a value is out of its range.
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
        check_float("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature: expected 0 or at least {MIN_TEMPERATURE}, got {self.temperature}"
            )
        check_int("top_k", self.top_k, 0, MAX_COUNT)
        check_float("top_p", self.top_p, 0.0, 1.0)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_float("presence_penalty", self.presence_penalty, -100.0, 100.0)
        check_float("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        check_int("max_tokens", self.max_tokens, 1, MAX_COUNT)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0)
        check_int("seed", self.seed, -(2**63), 2**63 - 1)
        for token, value in self.logit_bias.items():
            check_int("logit_bias", token, 0, MAX_COUNT)
            check_float("logit_bias", value, -1e9, 1e9)
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0, MAX_COUNT)
        for word in self.bad_words:
            for token in word:
                check_int("bad_words", token, 0, MAX_COUNT)
        if any(not word for word in self.bad_words):
            raise ValueError("bad_words has an empty sequence; each needs at least one token")

    @property
    def greedy(self) -> bool:
        """True if no noise is involved."""
        return self.temperature == 0.0

    def may_ban_all(self, vocab_size: int) -> bool:
        """Whether bad words and min_tokens can ban every token at once, so that none is left."""
        banned = {word[-1] for word in self.bad_words}
        if self.min_tokens:
            banned.update(self.stop_token_ids)
        return len(banned) >= vocab_size

    @property
    def truncates(self) -> bool:
        """True if top_k, top_p or min_p bans unlikely tokens."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def counts_tokens(self) -> bool:
        """True if the logits depend on how often tokens occurred."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True)
class Speculation:
    """Drafting options of a request.

    Attributes:
        drafter: Name of a drafter of the engine.
        verifier: Name of an acceptance rule.
        num_tokens: Most draft nodes per step; None leaves the number to the drafter.
        tree: Static tree as rank paths, like Medusa's choices, for drafters that take one. (0,) is
            the likeliest child of the last committed token, (0, 1) the second likeliest child of
            (0,).

    Raises:
        ValueError: If a value is out of its range.
    """

    drafter: str = "none"
    verifier: str = "sample"
    num_tokens: int | None = None
    tree: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.num_tokens is not None:
            check_int("num_tokens", self.num_tokens, 0)
        for path in self.tree or ():
            for rank in path:
                check_int("tree", rank, 0)
        if self.tree is not None and not all(self.tree):
            raise ValueError("tree has an empty path; each path needs at least one rank")
