"""Log-probabilities in text responses."""

from __future__ import annotations

from msgspec import Struct


class PromptLogprob(Struct, frozen=True, kw_only=True):
    """A token in its place of the prompt, as vLLM reports it.

    Attributes:
        rank: Rank among all tokens, 1 for the likeliest.
    """

    logprob: float
    rank: int
    decoded_token: str


# Of each prompt token: the token itself and the likeliest in its place, by token id.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct, frozen=True):
    """Log-probabilities, one entry per token. The first token of an echoed prompt has None.

    `text_offset` counts the characters before a token, those of an echoed prompt included.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct, frozen=True):
    """A token and its log-probability. `bytes` may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    """An output token and the likeliest tokens in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Log-probabilities, one entry per output token."""

    content: list[TokenLogprob]
    refusal: None = None
