"""The strategies: each joins one drafter and one verifier, and is chosen by name."""

from __future__ import annotations

from recserve.core.drafting import Strategy
from recserve.models.recommender import Recommender
from recserve.search.heads import Heads
from recserve.search.strategies.beam import BeamStrategy
from recserve.search.strategies.dense import DenseStrategy
from recserve.search.strategies.level_likelihood import LevelLikelihoodStrategy
from recserve.search.strategies.likelihood import LikelihoodStrategy
from recserve.search.strategies.nezha import NezhaStrategy
from recserve.search.strategies.parallel import ParallelStrategy
from recserve.search.strategies.rank import RankStrategy
from recserve.search.strategies.specgr import SpecGRStrategy
from recserve.search.strategies.speculative import SpeculativeStrategy
from recserve.search.strategies.text_scores import TextScoreStrategy
from recserve.search.strategies.warm import WarmStrategy

__all__ = [
    "RankStrategy",
    "SpeculativeStrategy",
    "TextScoreStrategy",
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
