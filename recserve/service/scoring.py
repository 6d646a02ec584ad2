"""Resolves the scoring that a request names against what the model can do."""

from __future__ import annotations

from dataclasses import asdict

from recserve.models.scoring import Scoring
from recserve.models.semantic_id_model import SemanticIdConfig
from recserve.schemas.items import InvalidRequest, ScoringChoice, UsedScoring


def resolve_scoring(choice: ScoringChoice, config: SemanticIdConfig) -> Scoring:
    """Returns what a request asks for; what it leaves open is as in the model.

    Raises:
        InvalidRequest: If the model cannot be scored that way.
    """
    own = config.scoring
    rule = choice.rule or own.rule
    scores_ends = rule == "vocabulary" and config.num_end_levels > 0
    if rule == "vocabulary" and not config.scores_vocabulary:
        raise InvalidRequest(
            "scoring.rule",
            "expected children or level, got 'vocabulary': this checkpoint was imported without "
            "the tokens that it needs; import it again without --only-rule",
        )
    if choice.end_tokens and not scores_ends:
        reason = (
            "this model generates nothing after an id"
            if rule == "vocabulary"
            else f"the rule {rule!r} does not score them"
        )
        raise InvalidRequest("scoring.end_tokens", f"expected false, got true: {reason}")
    if choice.end_tokens is not None:
        end_tokens = choice.end_tokens
    else:
        end_tokens = own.end_tokens if rule == own.rule else scores_ends
    temperature, power = choice.temperature, choice.length_penalty
    return Scoring(
        rule,
        own.temperature if temperature is None else temperature,
        end_tokens,
        own.length_penalty if power is None else power,
    )


def used_scoring(scoring: Scoring) -> UsedScoring:
    """Returns a scoring as answers have it."""
    return UsedScoring(**asdict(scoring))
