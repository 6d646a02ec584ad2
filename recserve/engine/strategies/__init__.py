"""The strategies: each joins one drafter and one verifier, and is chosen by name."""

from __future__ import annotations

from recserve.core.drafting import Strategy
from recserve.engine.heads import Heads
from recserve.engine.strategies.beam import BeamStrategy
from recserve.engine.strategies.likelihood import LikelihoodStrategy
from recserve.engine.strategies.rank import RankStrategy
from recserve.engine.strategies.speculative import SpeculativeStrategy
from recserve.engine.strategies.text_scores import TextScoreStrategy
from recserve.models.recommender import Recommender

__all__ = ["LikelihoodStrategy", "RankStrategy", "TextScoreStrategy", "recommend_strategies"]


def recommend_strategies(model: Recommender, heads: Heads) -> dict[str, Strategy]:
    """A recommender's strategies by name; those whose head was not trained are not there."""
    strategies: dict[str, Strategy] = {"beam": BeamStrategy(model)}
    if heads.self_draft is not None:
        strategies["speculative"] = SpeculativeStrategy(model, heads.self_draft)
    return strategies
