"""The strategies: each joins one drafter and one verifier, and is chosen by name."""

from __future__ import annotations

from recserve.core.drafting import Strategy
from recserve.engine.heads import Heads
from recserve.engine.strategies.beam import BeamStrategy
from recserve.engine.strategies.dense import DenseStrategy
from recserve.engine.strategies.level_likelihood import LevelLikelihoodStrategy
from recserve.engine.strategies.likelihood import LikelihoodStrategy
from recserve.engine.strategies.nezha import NezhaStrategy
from recserve.engine.strategies.parallel import ParallelStrategy
from recserve.engine.strategies.rank import RankStrategy
from recserve.engine.strategies.specgr import SpecGRStrategy
from recserve.engine.strategies.speculative import SpeculativeStrategy
from recserve.engine.strategies.text_scores import TextScoreStrategy
from recserve.engine.strategies.warm import WarmStrategy
from recserve.engine.strategies.warm_draft import WarmDraftStrategy
from recserve.models.recommender import Recommender

__all__ = [
    "RankStrategy",
    "SpeculativeStrategy",
    "TextScoreStrategy",
    "WarmDraftStrategy",
    "WarmStrategy",
    "likelihood_strategy",
    "recommend_strategies",
]


def recommend_strategies(model: Recommender, heads: Heads) -> dict[str, Strategy]:
    """A recommender's strategies by name; those whose head was not trained are not there."""
    strategies: dict[str, Strategy] = {}
    if model.config.level_heads:
        strategies["parallel"] = ParallelStrategy(model)
    if not model.config.autoregressive:
        return strategies
    strategies["beam"] = BeamStrategy(model)
    if heads.prefixes is not None:
        strategies["speculative"] = SpeculativeStrategy(model, heads.prefixes)
    if heads.nezha is not None:
        strategies["nezha"] = NezhaStrategy(model, heads.nezha)
    if heads.retriever is not None:
        strategies["dense"] = DenseStrategy(heads.retriever)
        strategies["specgr"] = SpecGRStrategy(model, heads.retriever)
    return strategies


def likelihood_strategy(model: Recommender) -> Strategy:
    """How a recommender scores given items: code after code, or all levels at once."""
    if model.config.autoregressive:
        return LikelihoodStrategy(model)
    return LevelLikelihoodStrategy(model)
