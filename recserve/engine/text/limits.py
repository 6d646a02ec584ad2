"""Limits of text requests: what a step may hold, and what a model can run."""

from __future__ import annotations

from dataclasses import dataclass

from recserve.models.language_model import LanguageModelConfig
from recserve.speculation.completion import TextQuery
from recserve.speculation.verifiers.registry import check_rule


class PromptTooLong(ValueError):
    """A prompt leaves no position for a token of output."""


@dataclass(frozen=True)
class TextLimits:
    """Limits of a text scheduler.

    Attributes:
        prefill_tokens: Most prompt tokens computed in a step, over all texts.
        draft_nodes: Most nodes of a draft.
    """

    prefill_tokens: int = 512
    draft_nodes: int = 64


def check_query(query: TextQuery, config: LanguageModelConfig) -> None:
    """Checks a request against the model's vocabulary and positions, and its rule's parameters.

    Raises:
        PromptTooLong: If the prompt leaves no position for a token of output.
        ValueError: If the prompt is empty, a token id is not in the vocabulary, every token may be
            banned, or the acceptance rule does not allow the sampling parameters.
    """
    prompt, params = query.prompt, query.params
    positions = config.decoder.max_positions
    if prompt.ndim != 1 or not prompt.shape[0]:
        raise ValueError(f"prompt is {prompt.shape}; it must be [n] with at least one token")
    if prompt.shape[0] >= positions:
        raise PromptTooLong(
            f"the prompt has {prompt.shape[0]} tokens; the model has {positions} positions and "
            "needs one for the output"
        )
    named = [*params.logit_bias, *params.stop_token_ids]
    named += [token for word in params.bad_words for token in word]
    for name, low, high in (
        ("prompt", int(prompt.min()), int(prompt.max())),
        ("a sampling parameter", min(named, default=0), max(named, default=0)),
    ):
        if low < 0 or high >= config.vocab_size:
            raise ValueError(
                f"{name} names tokens {low}..{high}; the vocabulary has {config.vocab_size} tokens"
            )
    if params.may_ban_all(config.vocab_size):
        raise ValueError(
            "bad_words, and stop_token_ids before min_tokens, ban every token; leave at least one "
            f"of the {config.vocab_size}"
        )
    check_rule(query.speculation.verifier, params)
