"""Scoring rules: how the score of an item follows from the logits of its codes.

The score is the sum of the log-probabilities of the codes, divided by a power of their number:

    score = sum_i log softmax(logits_i / temperature)[code_i] / n ** length_penalty

The rule says what the softmax runs over: the valid codes, all codes of the level, or all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Rule = Literal["children", "level", "vocabulary"]
MIN_TEMPERATURE, MAX_TEMPERATURE, MAX_LENGTH_PENALTY = 0.01, 100.0, 10.0


@dataclass(frozen=True)
class Scoring:
    """One way to score items.

    Attributes:
        rule: What the softmax of a level runs over: the valid `children`, all codes of the `level`,
            or all tokens of the `vocabulary`.
        temperature: Divides the logits before the softmax.
        end_tokens: Whether the tokens that the original generates after an id count. Only the rule
            `vocabulary` scores them: under the others they are certain.
        length_penalty: Power of the number of scored tokens that divides the sum; 0 divides by 1.

    Raises:
        ValueError: If a value is out of range; the message names the field.
    """

    rule: Rule
    temperature: float = 1.0
    end_tokens: bool = False
    length_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule is {self.rule!r}; choose one of {get_args(Rule)}")
        if not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}; expected {MIN_TEMPERATURE}..{MAX_TEMPERATURE}"
            )
        if not 0 <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise ValueError(
                f"length_penalty is {self.length_penalty}; expected 0..{MAX_LENGTH_PENALTY}"
            )
        if self.end_tokens and self.rule != "vocabulary":
            raise ValueError(f"end_tokens is true; the rule {self.rule!r} does not score them")
