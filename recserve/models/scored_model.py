"""A model under another scoring than its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from recserve.kernels.trie.native import NativeDescent
from recserve.models.scoring import Rule, Scoring
from recserve.models.semantic_id_model import SemanticIdConfig, SemanticIdModel


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
