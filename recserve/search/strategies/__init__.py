"""Strategies: one file for each way to answer an item request."""

from __future__ import annotations

from recserve.search.recommend_strategy import RecommendStrategy
from recserve.search.strategies.beam import BeamStrategy
from recserve.search.strategies.dense import DenseStrategy
from recserve.search.strategies.nezha import NezhaStrategy
from recserve.search.strategies.rpg import RpgStrategy
from recserve.search.strategies.specgr import SpecGRStrategy
from recserve.search.strategies.speculative import SpeculativeStrategy

# Reports list strategies in this order.
BUILT_IN: tuple[type[RecommendStrategy], ...] = (
    BeamStrategy,
    SpeculativeStrategy,
    NezhaStrategy,
    RpgStrategy,
    DenseStrategy,
    SpecGRStrategy,
)
