"""Scoring rules: how the score of an item follows from the logits of its codes.

The score is the sum of the log-probabilities of the codes, divided by a power of their number:

    score = sum_i log softmax(logits_i / temperature)[code_i] / n ** length_penalty

The rule says what the softmax runs over: the valid codes, all codes of the level, or all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from torch import Tensor

from recserve.kernels.trie.native import NativeDescent

if TYPE_CHECKING:
    from recserve.models.semantic_id_model import SemanticIdConfig, SemanticIdModel

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


@dataclass(frozen=True)
class ScoredConfig:
    """The configuration of a model under another scoring.

    Attributes:
        base: The model's own configuration, which says all that is not here.
        scoring: The scoring.
        normalization: Its rule.
        num_token_levels: Levels whose codes are scored.
    """

    base: Any
    scoring: Scoring
    normalization: Rule
    num_token_levels: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


class ScoredModel:
    """A model under another scoring. It shares all else with the model, also later changes."""

    def __init__(self, model: SemanticIdModel, scoring: Scoring) -> None:
        own = model.config
        left_out = 0 if scoring.end_tokens else own.num_end_levels
        self._model, self._temperature = model, scoring.temperature
        self.config = ScoredConfig(own, scoring, scoring.rule, own.num_token_levels - left_out)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def search(self) -> NativeDescent | None:
        """The search in C, which knows the rule `children` alone."""
        plain = self._temperature == 1 and self.config.normalization == "children"
        return self._model.search if plain else None

    def level_logits(self, hidden: Tensor, level: int) -> Tensor:
        """Returns logits [n, C_level], divided by the temperature."""
        return self._model.level_logits(hidden, level).float() / self._temperature

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [n, V], divided by the temperature."""
        return self._model.full_logits(hidden).float() / self._temperature


def with_scoring(model: SemanticIdModel, scoring: Scoring) -> SemanticIdModel:
    """Returns the model under a scoring: itself if only the divisor differs from what it does."""
    if _does_itself(model.config, scoring):
        return model
    return cast("SemanticIdModel", ScoredModel(model, scoring))


def _does_itself(config: SemanticIdConfig, scoring: Scoring) -> bool:
    ends = scoring.end_tokens or not config.num_end_levels or scoring.rule != "vocabulary"
    return scoring.rule == config.normalization and scoring.temperature == 1 and ends
